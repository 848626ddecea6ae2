"""Write encoders of runs to folders, and read such folders and foreign weights."""
