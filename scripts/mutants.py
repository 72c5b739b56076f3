"""Plant one bug at a time in a copy of the package and see whether the fast scheduling tests notice.

Prints a table and exits with 1 if a bug survives, with 2 if the place of one is not found exactly once.
"""

# ruff: noqa: T201  # a command line prints

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
TESTS = (
    "tests/sched",
    "tests/kv/test_pool.py",
    "tests/kv/test_table.py",
    "tests/kv/test_geometry.py",
    "tests/test_sequence.py",
)
SLOW = tuple(f"tests/sched/test_{name}.py" for name in ("properties", "replay", "model_check", "state_machine"))
"""Asked only when the others found nothing."""


class Mutant(NamedTuple):
    """A planted bug: ``old`` in ``file`` (below the package) becomes ``new``."""

    bug: str
    file: str
    old: str
    new: str


MUTANTS = (
    Mutant(
        "a request that stops gives up blocks that the step planned meanwhile still writes",
        "sched/scheduler.py",
        "        if step_id != tx.step_id:\n            self.kv.fence_sequence(seq, step_id)\n",
        "",
    ),
    Mutant(
        "a later step that ends early lifts the fence of an advanced one",
        "sched/scheduler.py",
        "self.kv.pool.pass_on(tx.step_id, self._advance.step_id)",
        "self.kv.pool.lift(tx.step_id)",
    ),
    Mutant(
        "a request is planned again after its last token by length",
        "sched/scheduler.py",
        "for seq_id in rows.keys() - last:",
        "for seq_id in rows.keys():",
    ),
    Mutant(
        "a step advances although its commit may have to preempt",
        "sched/scheduler.py",
        "        return len(self.running) + len(tx.plan.chunks) <= self.kv.pool.num_free\n",
        "        return True\n",
    ),
    Mutant(
        "a row that leaves an advanced step keeps its placeholder",
        "sched/advance.py",
        "            seq.drop_placeholder()\n",
        "            pass\n",
    ),
    Mutant(
        "an undone advance brings back a row that has ended",
        "sched/advance.py",
        "        self.undo = self.undo.without(seq)\n",
        "",
    ),
    Mutant(
        "steps are committed out of order behind an advanced one",
        "sched/scheduler.py",
        "        if advance.step_id != tx.step_id:\n            raise",
        "        if False:\n            raise",
    ),
    Mutant(
        "an abort in flight frees its blocks at once, without a fence",
        "sched/scheduler.py",
        "        if step_id is not None:\n            self.kv.fence_sequence(seq, step_id)\n",
        "",
    ),
    Mutant(
        "an abort during a copy frees its blocks at once",
        "sched/swapper.py",
        "            self._kv.fence_sequence(seq, copy.fence_id)\n",
        "            pass\n",
    ),
    Mutant(
        "a fence is never lifted when its step is over",
        "sched/scheduler.py",
        "        self.kv.pool.lift(tx.step_id)\n",
        "",
    ),
    Mutant(
        "one block too few for a length between two blocks",
        "kv/geometry.py",
        "return -(-num_tokens // block_size)",
        "return max(1, num_tokens // block_size)",
    ),
    Mutant(
        "the door counts the last token, which is never written",
        "kv/geometry.py",
        "num_prompt_tokens + max(0, max_tokens - 1)",
        "num_prompt_tokens + max_tokens",
    ),
    Mutant(
        "a rollback keeps the leased blocks",
        "sched/scheduler.py",
        "        tx.is_open = False\n        tx.return_leases(self.kv)\n",
        "        tx.is_open = False\n",
    ),
    Mutant(
        "a step ends the leases of rows it lost",
        "sched/transaction.py",
        "if self._scheduler.is_live(self, lease[0])]",
        "]",
    ),
    Mutant(
        "blocks are released last first, so the free list changes order",
        "kv/pool.py",
        "for block in reversed(self._owned(blocks)):",
        "for block in self._owned(blocks):",
    ),
    Mutant(
        "a wait goes on when its member is served",
        "sched/queues.py",
        "waits[member] = 0 if num_tokens else waits.get(member, 0) + 1",
        "waits[member] = waits.get(member, 0) + 1",
    ),
    Mutant(
        "a wait resets when its member is only tried",
        "sched/queues.py",
        "waits[member] = 0 if num_tokens else waits.get(member, 0) + 1",
        "waits[member] = 0",
    ),
    Mutant(
        "a victim may be older than the one in need",
        "sched/preempt.py",
        "if h.rank > rank and h.is_movable",
        "if h.rank != rank and h.is_movable",
    ),
    Mutant(
        "a sequence in flight may be the victim",
        "sched/preempt.py",
        "if h.rank > rank and h.is_movable and (h.num_blocks or h.shared_head)",
        "if h.rank > rank and (h.num_blocks or h.shared_head)",
    ),
    Mutant(
        "the need of one block takes two victims",
        "sched/preempt.py",
        "while num_free_blocks < 1 and younger:",
        "for _ in range(2 * (num_free_blocks < 1 and len(younger) > 1)):",
    ),
    Mutant(
        "those who have a block for their next token preempt too",
        "sched/preempt.py",
        "if holder is None or not holder.needs_block:",
        "if holder is None:",
    ),
    Mutant(
        "a swap by command takes the blocks of a step in flight",
        "sched/scheduler.py",
        "or seq.seq_id in self.in_flight or not self._swapper.has_room_for(seq):",
        "or not self._swapper.has_room_for(seq):",
    ),
    Mutant(
        "every chunk says that it ends its prompt",
        "sched/chunked.py",
        "is_terminal=n == lane.num_left",
        "is_terminal=True",
    ),
    Mutant(
        "a chunk may pass chunk_size",
        "sched/chunked.py",
        "total = min(before + tokens, self.chunk_size, lane.num_left, room)",
        "total = min(before + tokens, lane.num_left, room)",
    ),
    Mutant(
        "a chunk takes blocks that are not there",
        "sched/chunked.py",
        "total = min(before + tokens, self.chunk_size, lane.num_left, room)",
        "total = min(before + tokens, self.chunk_size, lane.num_left)",
    ),
    Mutant(
        "planning a step moves the rotation before it commits",
        "sched/scheduler.py",
        "        self._lease(tx, view.decode_needs_block)\n",
        "        self._lease(tx, view.decode_needs_block)\n"
        "        self.running.rotation = self.running.rotation.after(proposal.services)\n",
    ),
    Mutant(
        "a second commit is applied again",
        "sched/scheduler.py",
        "        tx.is_open = False\n        self._land(tx)",
        "        self._land(tx)",
    ),
    Mutant(
        "a request aborted in flight still gets its token",
        "sched/scheduler.py",
        "            if in_flight.get(seq_id) != step_id:\n                continue\n",
        "",
    ),
    Mutant(
        "a preempted request loses its place",
        "sched/queues.py",
        "        insort(self._order, seq.rank)\n",
        "        self._order.append(seq.rank)\n",
    ),
    Mutant(
        "an old copy that ends late moves its sequence again",
        "sched/swap.py",
        "if self.current.get(transfer.seq_id) == transfer else None",
        "if transfer.seq_id in self.current else None",
    ),
    Mutant(
        "a swapped sequence's device blocks are free before the copy is made",
        "sched/swapper.py",
        "        self._kv.fence_sequence(seq, transfer.fence_id)\n",
        "        self._kv.free_sequences([seq])\n",
    ),
    Mutant(
        "host blocks are not given back",
        "sched/swap.py",
        "        self.sizes.pop(seq_id, None)\n",
        "",
    ),
    Mutant(
        "two that come back from host memory fill the pool to the last block",
        "sched/swapper.py",
        "return max(self._ledger.sizes[seq.seq_id], num_blocks)",
        "return self._ledger.sizes[seq.seq_id]",
    ),
    Mutant(
        "decode rows are left out when a prefill wants to run",
        "sched/chunked.py",
        "            decode_rows=grants.decode_rows, chunks=step.chunks()",
        "            decode_rows=() if step.taken else grants.decode_rows, chunks=step.chunks()",
    ),
    Mutant(
        "max_partial_prefills is ignored",
        "sched/chunked.py",
        "num_free_lanes=max_lanes - (len(view.rotation.order) - 1),",
        "num_free_lanes=10**6,",
    ),
    Mutant(
        "newcomers take the headroom of the running",
        "sched/chunked.py",
        "num_promised_blocks=outstanding + view.num_headroom_blocks,",
        "num_promised_blocks=outstanding,",
    ),
    Mutant(
        "whole prompts take the headroom of the running",
        "sched/whole.py",
        "needed <= self._num_free_blocks - self._headroom",
        "needed <= self._num_free_blocks",
    ),
    Mutant(
        "short prompts take the blocks that a preempted one waits for",
        "sched/chunked.py",
        "if first is None or not first.was_preempted or first.seq_id in (candidate.seq_id, *self.lanes):",
        "if candidate is not None:",
    ),
    Mutant(
        "newcomers take the blocks that one in host memory waits for",
        "sched/scheduler.py",
        "return num_blocks + self._growth() + 1 if num_blocks else self._growth()",
        "return self._growth()",
    ),
    Mutant(
        "a preempted prompt starts again before there is room for all of it",
        "sched/chunked.py",
        "needed = blocks_for_tokens(candidate.num_prefill_tokens_left, self.block_size) if is_back else 1",
        "needed = 1",
    ),
    Mutant(
        "the room of one that came back is given to newcomers",
        "sched/chunked.py",
        "return lane.num_left if lane.was_preempted else min(lane.num_left, 2 * chunk_size)",
        "return min(lane.num_left, 2 * chunk_size)",
    ),
    Mutant(
        "priority does not age",
        "sched/ordering.py",
        "return Rank(priority * self.aging_steps + step, seq_id)",
        "return Rank(priority * self.aging_steps, seq_id)",
    ),
    Mutant(
        "a rank is forgotten",
        "sched/ordering.py",
        "return Rank(priority * self.aging_steps + step, seq_id)",
        "return Rank(0, seq_id)",
    ),
    Mutant(
        "a rollback queues a request twice",
        "sched/scheduler.py",
        "            if seq.status is SequenceStatus.WAITING and self.is_live(tx, seq):\n",
        "            if seq.status is SequenceStatus.WAITING:\n",
    ),
    Mutant(
        "a failed commit keeps the tokens it appended",
        "sched/scheduler.py",
        "                tx.sequences[row.seq_id].reset_decode(row.start)\n",
        "                pass\n",
    ),
    Mutant(
        "preemption forgets that outputs must be prefilled too",
        "sequence.py",
        "        self.prefill_target = self.num_tokens\n        self.num_preemptions += 1\n",
        "        self.num_preemptions += 1\n",
    ),
    Mutant(
        "a request gets one token more than max_tokens",
        "sequence.py",
        'return "length" if num_outputs >= self.max_tokens else None',
        'return "length" if num_outputs > self.max_tokens else None',
    ),
    Mutant(
        "rows in flight are not counted as rows",
        "sched/scheduler.py",
        "return len(self.running) + newcomers + len(self.swap.states)",
        "return len(self.running) + len(self.swap.states)",
    ),
    Mutant(
        "a sibling begins before its prompt is committed",
        "sched/forker.py",
        "is_committed = seq.committed_kv_tokens >= num_blocks * self._kv.block_size",
        "is_committed = self._kv.num_blocks(seq) >= num_blocks",
    ),
    Mutant(
        "siblings of a leader that leaves wait for ever",
        "sched/siblings.py",
        "if not group.donors and group.held:",
        "if False:",
    ),
    Mutant(
        "a sibling passes who came first",
        "sched/siblings.py",
        "is_first = first_waiting is None or seq.rank < first_waiting",
        "is_first = True",
    ),
    Mutant(
        "a sibling shares the block that both will write",
        "sched/siblings.py",
        "return (seq.num_prompt_tokens - 1) // block_size",
        "return -(-(seq.num_prompt_tokens - 1) // block_size)",
    ),
    Mutant(
        "a sibling takes its blocks without a reference of its own",
        "kv/table.py",
        "        self.pool.share(blocks)\n",
        "",
    ),
    Mutant(
        "blocks that a victim shares count as free",
        "sched/scheduler.py",
        "num_blocks=self.kv.num_blocks(seq.seq_id) - len(shared_head),",
        "num_blocks=self.kv.num_blocks(seq.seq_id),",
    ),
    Mutant(
        "shared blocks are swapped",
        "sched/swapper.py",
        "if num_blocks <= room and not self._kv.shared_head(seq):",
        "if num_blocks <= room:",
    ),
    Mutant(
        "siblings begin without a row",
        "sched/scheduler.py",
        "num_rows=self.max_batch_size - self._num_admitted() + len(finished),",
        "num_rows=self.max_batch_size,",
    ),
    Mutant(
        "a failed commit keeps the blocks that siblings began with",
        "sched/forker.py",
        "            self._kv.reopen_sequence_reservation(fork.sibling, 0)\n",
        "",
    ),
    Mutant(
        "decode rows wait two steps for whole prompts",
        "sched/whole.py",
        "if not view.decode_rows or view.num_decode_gap_steps:",
        "if not view.decode_rows or view.num_decode_gap_steps > 1:",
    ),
)


def misplaced(package: Path) -> list[str]:
    """Return the mutants whose old text is not in the package exactly once."""
    return [m.bug for m in MUTANTS if (package / m.file).read_text(encoding="utf-8").count(m.old) != 1]


def killer(mutant: Mutant, package: Path) -> str | None:
    """Return the first test that fails with ``mutant`` in a copy of ``package``, or None if it survives."""
    with tempfile.TemporaryDirectory() as folder:
        copy = shutil.copytree(package, Path(folder) / "moesaic", ignore=shutil.ignore_patterns("__pycache__"))
        source = copy / mutant.file
        source.write_text(source.read_text(encoding="utf-8").replace(mutant.old, mutant.new), encoding="utf-8")
        return _first_failure(folder, [*TESTS, *(f"--ignore={t}" for t in SLOW)]) or _first_failure(folder, [*SLOW])


def _first_failure(folder: str, tests: list[str]) -> str | None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:randomly",
        "--timeout=120",
    ]
    environment = os.environ | {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1", "MOESAIC_CHECK": "1"}
    environment["HYPOTHESIS_STORAGE_DIRECTORY"] = f"{folder}/hypothesis"
    done = subprocess.run([*command, *tests], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    failed = [line.split()[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return failed[0].split("::")[-1].split("[")[0] if failed else f"pytest exit {done.returncode}"


def main() -> int:
    """Run the mutants that were asked for (all without arguments) and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only the mutants whose description has one of these words")
    words = parser.parse_args().words
    package = ROOT / "src" / "moesaic"
    if lost := misplaced(package):
        print(f"not found exactly once, mend scripts/mutants.py: {lost}")
        return 2
    chosen = [m for m in MUTANTS if not words or any(w in m.bug for w in words)]
    print("| planted bug | in | noticed by |\n|---|---|---|")
    survivors = 0
    for mutant in chosen:
        test = killer(mutant, package)
        survivors += test is None
        print(f"| {mutant.bug} | `{mutant.file}` | {f'`{test}`' if test else '**nobody**'} |", flush=True)
    print(f"\n{len(chosen) - survivors} of {len(chosen)} noticed")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
