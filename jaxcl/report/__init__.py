"""Make pages, tables and pictures from run directories."""
