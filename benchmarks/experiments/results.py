# SPDX-License-Identifier: BSD-3-Clause
"""Result files of experiments: one JSON file each, replaced atomically after every cell."""

import json
import os

SCHEMA = 1
GIB = 1 << 30


def path_of(folder, name, tiny):
    return folder / f"{name}{'-tiny' if tiny else ''}.json"


def load(path, name, tiny):
    """The result in a file, or an empty one."""
    if not path.is_file():
        return {"schema": SCHEMA, "experiment": name, "tiny": tiny, "environments": [], "cells": {}}
    result = json.loads(path.read_text())
    if (result.get("schema"), result.get("experiment")) != (SCHEMA, name):
        raise ValueError(
            f"{path}: schema {result.get('schema')} of {result.get('experiment')}, expected {SCHEMA} of {name}"
        )
    return result


def write_text(path, text):
    """Replaces a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(text)
    os.replace(temporary, path)


def add(result, path, cell, record, facts=None):
    """Adds the record of a cell, with the index of its environment, and saves the result without environments
    that no cell has any more."""
    if facts is not None and not record.get("inferred") and record["status"] != "missing":
        if facts not in result["environments"]:
            result["environments"].append(facts)
        record |= {"environment": result["environments"].index(facts)}
    identity = {"method": cell.method, "size": cell.size, "order": cell.order, "gpus": cell.gpus}
    result["cells"][cell.key] = {**identity, **record}
    used = sorted({c["environment"] for c in result["cells"].values() if "environment" in c})
    result["environments"] = [result["environments"][index] for index in used]
    for other in result["cells"].values():
        if "environment" in other:
            other["environment"] = used.index(other["environment"])
    write_text(path, dumps(result))


def dumps(result):
    """JSON with one line per environment and per cell."""
    head = [
        f"{json.dumps(name)}: {json.dumps(value)}"
        for name, value in result.items()
        if name not in ("environments", "cells")
    ]
    environments = ",\n".join(json.dumps(facts) for facts in result["environments"])
    cells = ",\n".join(f"{json.dumps(key)}: {json.dumps(cell)}" for key, cell in result["cells"].items())
    body = [*head, f'"environments": [\n{environments}\n]', f'"cells": {{\n{cells}\n}}']
    return "{\n" + ",\n".join(body) + "\n}\n"


def cells_of(result, **wanted):
    """The cells with these values, by order of size."""
    found = [c for c in result["cells"].values() if all(c.get(k) == v for k, v in wanted.items())]
    return sorted(found, key=lambda cell: cell["order"])


def ordered(result, name):
    """The different values of ``method`` or ``size`` in the order of the sizes, then of the file."""
    cells = result["cells"].values()
    if name == "size":
        cells = sorted(cells, key=lambda cell: cell["order"])
    return list(dict.fromkeys(cell[name] for cell in cells))
