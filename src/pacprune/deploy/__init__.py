"""Files that leave the laboratory, and networks without their dead channels."""
