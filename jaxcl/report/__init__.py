"""From run directories to pages, tables and pictures."""
