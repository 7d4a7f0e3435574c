"""``patch``, ``unpatch``, their options and report."""
