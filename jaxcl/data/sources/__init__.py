"""Sources of data: readers of folders, files, libraries, and small sets drawn here."""
