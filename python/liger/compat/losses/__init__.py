"""liger_kernel's losses."""
