"""liger_kernel's functions and classes that patch models and trainers."""
