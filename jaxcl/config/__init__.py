"""From a ConfigDict to a job; configs are read nowhere else."""
