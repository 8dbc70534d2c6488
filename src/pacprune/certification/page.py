def embedded(folder):
    return ""
