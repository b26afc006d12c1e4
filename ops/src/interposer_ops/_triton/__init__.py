"""Portable Triton kernels of the standard ops.

One source runs on every GPU that triton compiles for, and on the processor by its interpreter.
Importing this package imports neither triton nor torch; its modules import both, and are loaded
when a kernel is chosen.

To add a kernel:

1. Write the function with the op's signature in a module here: shapes, strides, grid, launch, and
   nothing else. Return before the launch where there is nothing to do. Ask for launch parameters
   once per device and size, in a function that is ``per_device`` (as ``rows.row_tile`` is).
2. In the kernel, convert right after each load, ``tl.load(...).to(tl.float32)``, and on the store,
   ``.to(pointer.dtype.element_ty)``: the interpreter raises where it is forgotten. Make row numbers
   int64 before they are multiplied by a stride. Divide with ``tl.div_rn`` and take ``tl.sqrt_rn``
   where results are compared exactly; ``/`` is an approximation on some GPUs.
3. Add ``tuning/KERNEL.json``, see ``parameters``. Sizes that a layer fixes (widths, head sizes) are
   ``tl.constexpr``; counts of tokens are not, nor does a tile depend on them: results must not.
4. Add its record to ``interposer_ops._triton.records``, and what a record cannot say to a predicate
   in ``interposer_ops._triton.availability``, which imports neither triton nor torch.
5. Add its builds to a module of ``builds``: calls on tensors without memory. ``ahead`` records what
   they would launch and compiles that for every architecture; a target that the record refuses is
   named in ``without``. Write the table anew, ``python -m interposer_ops._triton.aot --write
   docs/triton-targets.md``; ``ops/tests/triton/test_compile.py`` asserts that nothing spills,
   that shared memory fits and that matrix instructions come out where they have to.

``TRITON_INTERPRET=1 interposer verify interposer-ops --platform interpreter`` compares all of them
with their references, as ``ops/tests/triton/test_interpreter.py`` does.

A launch goes to the process's current device, as triton does it: a platform of several devices
selects the one that its tensors are on.
"""
