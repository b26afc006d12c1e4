"""Honest kernels that are compiled or traced at import or in the first call.

Kind: compilation
Source: own
"""

import functools

import torch
from torch.nn import functional

_CPP = """
#include <torch/extension.h>
#include <cmath>

at::Tensor silu_and_mul(const at::Tensor& x) {
  auto rows = x.to(at::kDouble).contiguous();
  const int64_t width = x.size(-1) / 2;
  auto shape = x.sizes().vec();
  shape.back() = width;
  auto result = at::empty(shape, rows.options());
  const double* source = rows.data_ptr<double>();
  double* target = result.data_ptr<double>();
  for (int64_t i = 0; i < result.numel(); ++i) {
    const int64_t row = i / width, column = i % width;
    const double gate = source[row * 2 * width + column];
    target[i] = gate / (1 + std::exp(-gate)) * source[row * 2 * width + width + column];
  }
  return result.to(x.scalar_type());
}
"""


@functools.cache
def _extension():
    from torch.utils import cpp_extension

    return cpp_extension.load_inline("corpus_silu_and_mul", _CPP, functions=["silu_and_mul"])


def cpp_extension_inline(x):
    """Compiles C++ in the first call, by torch.utils.cpp_extension.

    Op: silu_and_mul
    Needs: compiler
    """
    return _extension().silu_and_mul(x)


@functools.cache
def _compiled():
    def silu_and_mul(x):
        gate, up = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
        return (functional.silu(gate) * up).to(x.dtype)

    return torch.compile(silu_and_mul, dynamic=True)


def torch_compile(x):
    """Compiles by torch.compile in the first call of each form.

    Op: silu_and_mul
    Needs: compiler
    """
    return _compiled()(x)


@functools.cache
def _eager():
    def norm(x, weight, eps: float):
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (wide * scale * weight).to(x.dtype)

    return torch.compile(norm, backend="eager", dynamic=True)


def eager_backend(x, weight, eps):
    """Captures a graph by torch.compile, and runs it without a compiler.

    Op: rms_norm
    """
    return _eager()(x, weight, eps)


_TRACED = {}


def traced_graph(x, weight, eps):
    """Traces the function by torch.fx, and runs the graph module.

    Op: rms_norm
    """
    if not _TRACED:

        def norm(x, weight, eps):
            wide = x.double()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
            return wide * scale * weight

        _TRACED["norm"] = torch.fx.symbolic_trace(norm)
    return _TRACED["norm"](x, weight, eps).to(x.dtype)


_GENERATED = {}


def generated_code(x):
    """Generates Python code for each width, and runs it by exec.

    Op: silu_and_mul
    """
    width = x.shape[-1] // 2
    if width not in _GENERATED:
        code = (
            "def kernel(x):\n"
            f"    gate, up = x[..., :{width}].double(), x[..., {width}:].double()\n"
            "    return (functional.silu(gate) * up).to(x.dtype)\n"
        )
        names = {"functional": functional}
        exec(code, names)
        _GENERATED[width] = names["kernel"]
    return _GENERATED[width](x)


_library = torch.library.Library("corpus_honest", "DEF")
_library.define("rotated(Tensor x, Tensor cos, Tensor sin) -> Tensor")


def _rotated(x, cos, sin):
    half = cos.shape[-1]
    a, b, tail = x.to(cos.dtype).tensor_split((half, 2 * half), dim=-1)
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    return torch.cat((a * c - b * s, b * c + a * s, tail), dim=-1).to(x.dtype)


_library.impl("rotated", _rotated, "CompositeExplicitAutograd")


def registered_operator(query, key, cos, sin):
    """Registers an operator of torch.library at import, and calls it.

    Op: rotary_embedding
    """
    operator = torch.ops.corpus_honest.rotated
    return operator(query, cos, sin), operator(key, cos, sin)
