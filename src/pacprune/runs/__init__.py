"""Run folders: from options to a network, its report and its figures."""
