"""The tensors of one step, built from the scheduler's chunks."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from interposer import AttentionBatch
from interposer_engine._prompt_runs import FIRST_VIRTUAL_ID, overlapping, token_positions
from interposer_engine._scheduler import Chunk
from interposer_models.decoder import EmbeddedRows


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step with positions and cache pages, packed without padding.

    Attributes:
        token_ids: ``[T]`` int64.
        positions: ``[T]`` int64; or ``[3, T]``, time, height and width, if the step computes runs
            that have such positions.
        attention: Paged batch with the pages of the first page pool.
        other_pools: The same batch with the pages of each other pool. If the model has an encoder,
            the last one has the lengths and pages of the encoder inputs.
        embedded: The tokens whose vectors an encoder has computed; None in steps without runs.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionBatch
    other_pools: tuple[AttentionBatch, ...] = ()
    embedded: EmbeddedRows | None = None

    @property
    def by_pool(self) -> tuple[AttentionBatch, ...]:
        """The attention batch of each page pool, in the order of the pools."""
        return (self.attention, *self.other_pools)

    @classmethod
    def build(
        cls,
        chunks: Sequence[Chunk],
        page_size: int,
        device: str,
        min_pages: int = 1,
        with_states: bool = False,
        with_prefixes: bool = False,
    ) -> StepBatch:
        """Build the tensors of a step from the scheduler's chunks.

        Args:
            min_pages: Least number of columns of the page table.
            with_states: Whether the model keeps recurrent states, so that sequences have state
                slots.
            with_prefixes: Whether prompt tokens attend in both directions, as in a prefix-LM.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        # Indices of chunks with tokens of runs.
        encoded: list[int] = []
        starts = [0]
        lengths: list[int] = []
        table_width = max(min_pages, *(len(chunk.sequence.pages[0]) for chunk in chunks))
        has_encoder_input = bool(chunks[0].sequence.source)
        if has_encoder_input:  # graphs have one width for all page tables
            table_width = max(table_width, *(len(chunk.sequence.source_pages) for chunk in chunks))
        # For each pool: the slots to write, then the rows of the page table.
        pool_parts: list[list[int]] = [[] for _ in range(2 * len(chunks[0].sequence.pages))]
        for chunk in chunks:
            sequence = chunk.sequence
            start, stop = sequence.num_computed, sequence.num_computed + chunk.num_rows
            token_ids += sequence.tokens(start, start + chunk.num_tokens)
            token_ids += chunk.drafts
            if not sequence.runs:
                positions += range(start, stop)
            elif start >= sequence.runs[-1].stop:
                shift = sequence.runs[-1].position_shift
                positions += range(start + shift, stop + shift)
            else:
                encoded.append(len(lengths))
                positions += token_positions(sequence.runs, start, stop)[0]
            starts.append(len(token_ids))
            lengths.append(stop)
            for pages, slots, table in zip(
                sequence.pages, pool_parts[::2], pool_parts[1::2], strict=True
            ):
                # Slot = page number * page size + offset in the page: where a backend writes the
                # key and value.
                slots += [
                    pages[p // page_size] * page_size + p % page_size for p in range(start, stop)
                ]
                table += pages
                table += [0] * (table_width - len(pages))
        # One tensor that is split afterwards: creating six takes as long as a layer of a decode.
        states = [chunk.sequence.state_slot for chunk in chunks] if with_states else []
        max_lengths = [max(chunk.num_rows for chunk in chunks), max(lengths)]
        if has_encoder_input:
            pool_parts += _encoder_inputs(chunks, table_width)
            max_lengths.append(max(pool_parts[-2]))
        prefixes = _prefix_lens(chunks) if with_prefixes else []
        embedded = None
        if encoded:
            embedded = _embedded_rows(chunks, encoded, starts, device)
            # Virtual ids are not in the vocabulary; the vectors replace the looked up ones.
            token_ids = [0 if token >= FIRST_VIRTUAL_ID else token for token in token_ids]
            prefixes = prefixes or _mutual_lens(chunks, encoded)
            positions = _all_coordinates(chunks, encoded) or positions
        value_lists = (token_ids, positions, starts, lengths, states, prefixes, *pool_parts)
        host_values = torch.tensor([*itertools.chain(*value_lists)], dtype=torch.int64)
        sizes = [len(part) for part in value_lists]
        host_batch = cls._from_parts(
            host_values.split(sizes), table_width, max_lengths, None, embedded
        )
        # On a host, the tensors are already where the backends read them.
        if host_values.device == torch.device(device):
            return host_batch
        # Keep the host copy, so that backends that plan on the host need not wait for the device.
        device_values = host_values.to(device, non_blocking=True).split(sizes)
        return cls._from_parts(device_values, table_width, max_lengths, host_batch, embedded)

    @classmethod
    def _from_parts(
        cls,
        parts: Sequence[torch.Tensor],
        table_width: int,
        max_lengths: Sequence[int],
        host: StepBatch | None,
        embedded: EmbeddedRows | None,
    ) -> StepBatch:
        """Assemble the batch from slices of one tensor, in the order that ``build`` defines."""
        tokens, positions, query_starts, seq_lens, states, prefixes, slots, pages, *pool_parts = (
            parts
        )
        attention = AttentionBatch(
            query_starts=query_starts,
            seq_lens=seq_lens,
            page_table=pages.view(len(seq_lens), table_width),
            slots=slots,
            max_query_tokens=max_lengths[0],
            max_seq_tokens=max_lengths[1],
            state_slots=states if len(states) else None,
            prefix_lens=prefixes if len(prefixes) else None,
            host=host.attention if host else None,
        )
        other_pools = [
            replace(
                attention,
                slots=slots,
                page_table=pages.view(len(seq_lens), table_width),
                host=host.other_pools[number] if host else None,
            )
            for number, (slots, pages) in enumerate(
                zip(pool_parts[::2], pool_parts[1::2], strict=True)
            )
        ]
        if len(max_lengths) > 2:
            # Steps only read the encoder inputs, so that these slots are a placeholder.
            encoder_batch = replace(
                other_pools.pop(),
                slots=attention.slots,
                seq_lens=pool_parts[-2],
                max_seq_tokens=max_lengths[2],
            )
            other_pools.append(encoder_batch)
        if len(positions) > len(tokens):
            positions = positions.view(3, len(tokens))
        return cls(tokens, positions, attention, tuple(other_pools), embedded)


def _prefix_lens(chunks: Sequence[Chunk]) -> list[int]:
    """Return the prompt lengths; an empty list if no token may attend to a later prompt token."""
    sequences = [chunk.sequence for chunk in chunks]
    if any(sequence.num_computed + 1 < len(sequence.prompt) for sequence in sequences):
        return [len(sequence.prompt) for sequence in sequences]
    return []


def _mutual_lens(chunks: Sequence[Chunk], encoded: Sequence[int]) -> list[int]:
    """Return the ends of the runs whose tokens attend in both directions, and 0 for other chunks.

    The scheduler computes such a run in a chunk of its own, so all queries of the chunk see it.
    The list is empty if no chunk is such a run.
    """
    ends = [0] * len(chunks)
    for index in encoded:
        run = chunks[index].sequence.next_mutual_run
        if run is not None and run.start <= chunks[index].sequence.num_computed:
            ends[index] = run.stop
    return ends if any(ends) else []


def _all_coordinates(chunks: Sequence[Chunk], encoded: Sequence[int]) -> list[int]:
    """Return the times of all tokens, then the heights, then the widths.

    The list is empty if no run of the step has positions of its own.
    """
    spans = [
        (chunk.sequence.num_computed, chunk.sequence.num_computed + chunk.num_rows)
        for chunk in chunks
    ]
    if all(
        run.input.positions is None
        for index in encoded
        for run, _ in overlapping(chunks[index].sequence.runs, *spans[index])
    ):
        return []
    axes: list[list[int]] = [[], [], []]
    for chunk, span in zip(chunks, spans, strict=True):
        for axis, coordinates in zip(
            axes, token_positions(chunk.sequence.runs, *span), strict=True
        ):
            axis += coordinates
    return [*itertools.chain(*axes)]


def _embedded_rows(
    chunks: Sequence[Chunk], encoded: Sequence[int], starts: Sequence[int], device: str
) -> EmbeddedRows | None:
    """Return the vectors of the step's encoded tokens; None if the step has text only.

    Args:
        starts: Row of the first token of each chunk.
    """
    rows: list[int] = []
    embeddings: list[torch.Tensor] = []
    layers: list[tuple[torch.Tensor, torch.Tensor]] = []
    for index in encoded:
        chunk, sequence = chunks[index], chunks[index].sequence
        first = sequence.num_computed
        for run, tokens in overlapping(sequence.runs, first, first + chunk.num_tokens):
            run_rows = range(starts[index], starts[index + 1])[tokens.start - first :][
                : len(tokens)
            ]
            rows += run_rows
            part = slice(tokens.start - run.start, tokens.stop - run.start)
            embeddings.append(run.input.embeddings[part].to(device))
            if run.input.layer_embeddings is not None:
                vectors = run.input.layer_embeddings[:, part].to(device)
                layers.append((torch.tensor([*run_rows], device=device), vectors))
    if not rows:
        return None
    return EmbeddedRows(torch.tensor(rows, device=device), torch.cat(embeddings), layers)


def _encoder_inputs(chunks: Sequence[Chunk], table_width: int) -> list[list[int]]:
    """Return the lengths of the encoder inputs, and the page-table rows flattened to one list."""
    lengths: list[int] = []
    table: list[int] = []
    for chunk in chunks:
        pages = chunk.sequence.source_pages
        lengths.append(len(chunk.sequence.source))
        table += [*pages, *[0] * (table_width - len(pages))]
    return [lengths, table]
