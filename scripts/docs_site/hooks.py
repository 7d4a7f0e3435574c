# SPDX-License-Identifier: BSD-3-Clause
"""Settings of the site that follow from other files: the version in its header, the link to the repository
and an edit link on each page. mkdocs.yml names this file under ``hooks``."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def on_config(config):
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "python/liger/__init__.py").read_text(), re.M)
    config.site_name += f" {version}"
    ((address, comment),) = re.findall(
        r'^Repository = "(.+)"(.*)$', (ROOT / "pyproject.toml").read_text(), re.M
    )
    if "placeholder" not in comment:
        config.repo_url, config.repo_name, config.edit_uri = address, "Repository", "edit/main/"
    return config


def on_page_markdown(markdown, page, **_):
    """Generated pages have no edit link."""
    if not (ROOT / page.file.src_uri).is_file():
        page.edit_url = None
    return markdown
