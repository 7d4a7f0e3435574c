# SPDX-License-Identifier: BSD-3-Clause
"""Optional packages: each is installed by the extra of liger-ops with its name."""


def install(package: str) -> str:
    """The command that installs an optional package."""
    return f'pip install "liger-ops[{package}]"'


def missing(user: str, package: str) -> str:
    """The message of an error: ``user`` is what needs the package."""
    return f"{user} needs {package}, which is not installed: {install(package)}"
