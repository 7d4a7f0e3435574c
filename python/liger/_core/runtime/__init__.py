"""What ``import liger`` needs first: compiled libraries, environment variables, optional packages."""
