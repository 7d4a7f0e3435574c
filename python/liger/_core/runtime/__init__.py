"""The first imports of ``import liger``: compiled libraries, environment variables, optional packages."""
