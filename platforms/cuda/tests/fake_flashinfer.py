"""Stand-ins for the classes of flashinfer-python that interposer-cuda calls.

Signatures: those that 0.6.0 and 0.7.2 of flashinfer-python share.
"""

# mypy: ignore-errors
import torch
from fake_attention import attend_pages, same, whole


class Paged:
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, backend="auto",
        buffers=None,
    ):  # fmt: skip
        assert float_workspace_buffer.numel() >= 128 * 2**20
        self._float_workspace_buffer = float_workspace_buffer
        assert kv_layout == "NHD"
        assert use_cuda_graph == bool(buffers)
        self.backend, self.buffers = backend, buffers

    def keep(self, starts, indptr, indices, last_page_len, heads, dim, page_size, causal, facts):
        whole(starts, indptr, indices, last_page_len)
        # On the host, as these are: others would be waited for.
        assert len(indices) == int(indptr[-1])
        assert len(indptr) == len(last_page_len) + 1
        self.most_queries = int(starts.diff().max())
        self.most_pages = int(indptr.diff().max())
        if self.buffers is None:
            self.indptr, self.indices, self.last_page_len = indptr, indices, last_page_len
        else:
            held_starts, held_indices, held_last = self.buffers
            assert len(held_last) == len(last_page_len), "the batch size is fixed"
            held_starts.copy_(indptr)
            held_last.copy_(last_page_len)
            held_indices[: len(indices)].copy_(indices)
            self.indptr, self.indices, self.last_page_len = self.buffers
            self.most_pages = len(held_indices) // len(held_last)
        self.starts, self.causal = starts, causal
        self.sizes, self.facts = (*heads, dim, page_size), facts

    def run(
        self, q, paged_kv_cache, *, q_scale=None, k_scale=None, v_scale=None, out=None, lse=None,
        return_lse=False, enable_pdl=None, window_left=None, sinks=None,
    ):  # fmt: skip
        facts, (keys, values) = self.facts, paged_kv_cache
        same(q)
        assert (q.dtype, keys.dtype) == (facts["q_data_type"], facts["kv_data_type"])
        assert (q.shape[1], keys.shape[2], q.shape[2], keys.shape[1]) == self.sizes
        if keys.dtype != q.dtype:
            assert self.backend == "fa2"
            assert type(k_scale) is type(v_scale) is float
        scale = facts["sm_scale"] * (1.0 if k_scale is None else k_scale)
        window = (facts["window_left"], -1)
        places = self.indptr[:-1, None] + torch.arange(self.most_pages)
        pages = self.indices[places.clamp(max=len(self.indices) - 1).long()]
        # As its get_seq_lens has it.
        full = (self.indptr.diff() - 1).clamp(min=0) * self.sizes[3]
        found = attend_pages(
            q, self.starts, pages, full + self.last_page_len, (keys, values), self.most_queries,
            scale, window, self.causal, facts["logits_soft_cap"] or 0.0,
        )  # fmt: skip
        return found if v_scale is None else found * v_scale


class BatchDecodeWithPagedKVCacheWrapper(Paged):
    def __init__(
        self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False,
        use_tensor_cores=False, paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None, backend="auto",
    ):  # fmt: skip
        buffers = None
        if use_cuda_graph:
            buffers = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
            whole(*buffers)
            assert len(buffers[0]) == len(buffers[2]) + 1
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend, buffers)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        *, window_left=-1, logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
        sm_scale=None,
    ):  # fmt: skip
        assert self.use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        starts = torch.arange(len(indptr), dtype=torch.int32)
        facts = {k: v for k, v in locals().items() if k in FACTS}
        heads = num_qo_heads, num_kv_heads
        # One query sees all there is, so that there is nothing causal.
        self.keep(starts, indptr, indices, last_page_len, heads, head_dim, page_size, False, facts)


class BatchPrefillWithPagedKVCacheWrapper(Paged):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, *, causal=False, sm_scale=None, window_left=-1,
        logits_soft_cap=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        facts = {k: v for k, v in locals().items() if k in FACTS}
        heads = num_qo_heads, num_kv_heads
        pages = paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len
        self.keep(qo_indptr, *pages, heads, head_dim_qk, page_size, causal, facts)


class BatchMLAPagedAttentionWrapper:
    def __init__(
        self, float_workspace_buffer, use_cuda_graph=False, qo_indptr=None, kv_indptr=None,
        kv_indices=None, kv_len_arr=None, backend="auto",
    ):  # fmt: skip
        assert float_workspace_buffer.numel() >= 128 * 2**20
        self._float_workspace_buffer = float_workspace_buffer
        assert backend in ("fa2", "fa3")
        self.buffers = (qo_indptr, kv_indptr, kv_indices, kv_len_arr) if use_cuda_graph else ()
        whole(*self.buffers)

    def plan(
        self, qo_indptr, kv_indptr, kv_indices, kv_len_arr, num_heads, head_dim_ckv, head_dim_kpe,
        page_size, causal, sm_scale, q_data_type, kv_data_type, use_profiler=False,
    ):  # fmt: skip
        numbers = qo_indptr, kv_indptr, kv_indices, kv_len_arr
        whole(*numbers)
        assert len(kv_indices) == int(kv_indptr[-1])
        assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
        assert q_data_type == kv_data_type
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        counts = qo_indptr.diff()
        tile = 128 if int(counts.sum()) * num_heads // len(counts) > 64 else 64
        assert int(-(-counts * num_heads // tile).sum()) <= 16384, "items of work"
        self.most_queries = int(counts.max())
        if self.most_queries > 1 or num_heads > tile:
            assert tile % num_heads == 0, "keys are missed"
        self.most_pages = int(kv_indptr.diff().max())
        if self.buffers:
            for held, given in zip(self.buffers, numbers, strict=True):
                assert held is self.buffers[2] or held.shape == given.shape
                held[: len(given)].copy_(given)
            numbers = self.buffers
            self.most_pages = len(numbers[2]) // len(numbers[3])
        self.starts, self.indptr, self.indices, self.lengths = numbers
        self.facts = num_heads, page_size, sm_scale, causal

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache, out=None, lse=None, return_lse=False):
        same(q_nope, q_pe, ckv_cache, kpe_cache)
        num_heads, page_size, scale, causal = self.facts
        assert (q_nope.shape[1], ckv_cache.shape[1]) == (num_heads, page_size)
        places = self.indptr[:-1, None] + torch.arange(self.most_pages)
        pages = self.indices[places.clamp(max=len(self.indices) - 1).long()]
        latent, rotary = ckv_cache[:, :, None], kpe_cache[:, :, None]
        caches = torch.cat((latent, rotary), -1), latent
        RUNS.append(len(q_nope))
        return attend_pages(
            torch.cat((q_nope, q_pe), -1), self.starts, pages, self.lengths, caches,
            self.most_queries, scale, (-1, -1), causal, 0.0,
        )  # fmt: skip


# Tokens of each call of latent attention.
RUNS = []
FACTS = {"window_left", "logits_soft_cap", "q_data_type", "kv_data_type", "sm_scale"}
