# SPDX-License-Identifier: BSD-3-Clause
"""The sources of a release: a commit, with links that lead somewhere from the page of a package
index."""

import io
import re
import shutil
import subprocess
import tarfile

FURTHER_URLS = """\
Documentation = "{address}/tree/v{version}/docs"
Changelog = "{address}/blob/v{version}/CHANGELOG.md"
Issues = "{address}/issues"
"""


def stage(root, folder, version):
    """Writes the tracked files of the checkout, with uncommitted changes, to a folder, which it empties
    first."""
    shutil.rmtree(folder, ignore_errors=True)
    # A commit of the uncommitted changes that is in no branch; nothing where there are none.
    changed = subprocess.run(
        ["git", "stash", "create"], cwd=root, stdout=subprocess.PIPE, text=True, check=True
    )
    tree = changed.stdout.strip() or "HEAD"
    archive = subprocess.run(["git", "archive", tree], cwd=root, stdout=subprocess.PIPE, check=True)
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as members:
        members.extractall(folder, filter="data")
    settings = folder / "pyproject.toml"
    text = settings.read_text()
    ((line, address),) = re.findall(r'^(Repository = "(.+)".*\n)', text, re.M)
    settings.write_text(text.replace(line, line + FURTHER_URLS.format(address=address, version=version)))
    readme = folder / "README.md"
    readme.write_text(absolute_links(readme.read_text(), root, address, version))


def absolute_links(text, root, address, version):
    """The Markdown of a page in the top folder, with the links to files of the repository, and its pictures,
    as addresses."""

    def absolute(match):
        before, target, after = match.groups()
        if not (root / target.partition("#")[0]).exists():
            return match[0]
        kind = "raw" if before.startswith(("!", "<")) else "blob"
        return f"{before}{address}/{kind}/v{version}/{target}{after}"

    text = re.sub(r"(!?\[[^\]]*\]\()([^)#][^)]*)(\))", absolute, text)
    return re.sub(r'(<img src=")([^"]+)(")', absolute, text)
