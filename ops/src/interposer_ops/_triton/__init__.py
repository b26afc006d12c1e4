"""Shared parts of the portable Triton kernels: declarations, launch parameters, builds.

One source runs on every GPU that triton compiles for, and on the CPU by triton's interpreter.
Importing this package imports neither triton nor torch.

To add a kernel to ``FAMILY/_x_triton.py``:

1. Write the launcher: a function with the op's signature below ``@triton_kernel``. The launcher
   only computes shapes, strides and grid, and launches. Return before the launch if a tensor is
   empty. Look up launch parameters once per device and size, in a ``per_device`` function (such as
   ``rows.row_tile``). Put conditions that a record cannot express into a predicate in
   ``availability``.
2. In the kernel, convert right after each load, ``tl.load(...).to(tl.float32)``, and on the store,
   ``.to(pointer.dtype.element_ty)``: the interpreter raises if a conversion is missing. Convert row
   numbers to int64 before you multiply by a stride. Use ``tl.div_rn`` and ``tl.sqrt_rn`` if results
   are compared exactly; ``/`` is an approximation on some GPUs.
3. Add ``FAMILY/tuning/KERNEL.json``, see ``parameters``. Sizes that a layer fixes (widths, head
   sizes) are ``tl.constexpr``. The number of tokens is not, and must not change the tile: results
   must not depend on the batch.
4. Add builds of the kernel to ``BUILDS``: calls on meta tensors, compiled for every architecture.
   List architectures that the record refuses in ``without``. Write the records anew with
   ``python -m interposer_ops._declare``; ``ops/tests/triton`` asserts that no register spills and
   that shared memory fits, and runs the kernel on the interpreter.

Triton launches on the process's current device: a platform with several devices must select the
device of the tensors first.
"""
