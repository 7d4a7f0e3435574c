# SPDX-License-Identifier: BSD-3-Clause
"""What ``liger`` is where liger-ops is not installed: kernel-builder imports the layers in such an
environment."""


class _Missing:
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        raise ModuleNotFoundError(
            f"the layers of this repository call liger.{name}, but liger-ops is not installed: pip install liger-ops",
            name="liger",
        )


liger = _Missing()
