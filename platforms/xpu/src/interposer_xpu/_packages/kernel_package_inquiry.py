"""A program that imports vllm-xpu-kernels and prints the faults of each op as JSON.

    python kernel_package_inquiry.py SCHEMAS

It runs in a process of its own: the package loads libraries of its vendor, which may end it.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module


def faults(schemas: dict[str, str]) -> dict[str, str]:
    """Return for every op why it cannot be used; empty where it can."""
    import torch

    failed: dict[str, str] = {}
    for module in sorted({name.partition("::")[0] for name in schemas}):
        try:
            import_module(f"vllm_xpu_kernels.{module}")
        except (ImportError, OSError, RuntimeError) as error:
            failed[module] = f"cannot be had, its module {module} fails: {error}"
    found = {}
    for name, schema in schemas.items():
        namespace, _, op = name.partition("::")
        if namespace in failed:
            found[name] = failed[namespace]
            continue
        try:
            registered = str(getattr(getattr(torch.ops, namespace), op).default._schema)
        except AttributeError:
            found[name] = "does not exist"
            continue
        wanted = str(torch._C.parse_schema(f"{name}{schema}"))
        found[name] = "" if registered == wanted else f"has another schema: {registered}"
    return found


if __name__ == "__main__":
    sys.stdout.write(json.dumps(faults(json.loads(sys.argv[1]))) + "\n")
