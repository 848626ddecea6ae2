"""Every method on a few small problems, at equal budgets of FLOPs."""
