"""Portable Triton kernels of the standard ops: what their modules share.

One source runs on every GPU that triton compiles for, and on the processor by its interpreter.
Importing this package imports neither triton nor torch.

To add a kernel to ``FAMILY/_x_triton.py``:

1. Write the function with the op's signature below ``@triton_kernel``: shapes, strides, grid,
   launch, and nothing else. Return before the launch where there is nothing to do. Ask for launch
   parameters once per device and size, in a function that is ``per_device`` (as ``rows.row_tile``
   is). What a record cannot say goes to a predicate in ``availability``.
2. In the kernel, convert right after each load, ``tl.load(...).to(tl.float32)``, and on the store,
   ``.to(pointer.dtype.element_ty)``: the interpreter raises where it is forgotten. Make row numbers
   int64 before they are multiplied by a stride. Divide with ``tl.div_rn`` and take ``tl.sqrt_rn``
   where results are compared exactly; ``/`` is an approximation on some GPUs.
3. Add ``FAMILY/tuning/KERNEL.json``, see ``parameters``. Sizes that a layer fixes (widths, head
   sizes) are ``tl.constexpr``; counts of tokens are not, nor does a tile depend on them: results
   must not.
4. Add its builds to ``BUILDS``: calls on tensors without memory, which are compiled for every
   architecture; one that the record refuses is named in ``without``. Write the records anew,
   ``python -m interposer_ops._declare``; ``ops/tests/triton`` asserts that nothing spills and that
   shared memory fits, and runs the kernel on the interpreter.

A launch goes to the process's current device, as triton does it: a platform of several devices
selects the one that its tensors are on.
"""
