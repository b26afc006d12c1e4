"""Program that imports vllm-xpu-kernels and prints the fault of each op as JSON.

    python kernel_package_inquiry.py SCHEMAS

The program runs in a child process: the package loads libraries of Intel, which may crash.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module


def faults(schemas: dict[str, str]) -> dict[str, str]:
    """Return, by op, the reason why the op cannot be used; "" for a usable op."""
    import torch

    fault_by_module: dict[str, str] = {}
    for module in sorted({name.partition("::")[0] for name in schemas}):
        try:
            import_module(f"vllm_xpu_kernels.{module}")
        except (ImportError, OSError, RuntimeError) as error:
            fault_by_module[module] = f"cannot be had, its module {module} fails: {error}"
    fault_by_op = {}
    for name, schema in schemas.items():
        namespace, _, op = name.partition("::")
        if namespace in fault_by_module:
            fault_by_op[name] = fault_by_module[namespace]
            continue
        try:
            registered = str(getattr(getattr(torch.ops, namespace), op).default._schema)
        except AttributeError:
            fault_by_op[name] = "does not exist"
            continue
        # parse_schema() writes the expected schema in the notation of the registered one.
        expected = str(torch._C.parse_schema(f"{name}{schema}"))
        fault_by_op[name] = "" if registered == expected else f"has another schema: {registered}"
    return fault_by_op


if __name__ == "__main__":
    sys.stdout.write(json.dumps(faults(json.loads(sys.argv[1]))) + "\n")
