"""An engine of your own that takes only pagedkv's memory and attention, with NumPy.

A model of one layer with random weights continues three prompts at once. The last two begin alike:
what they share is computed and stored once.
"""

import numpy as np

from pagedkv import KVCacheManager
from pagedkv.attention import KVStorage, LayerShape

HEADS, KV_HEADS, DIM, BLOCK_SIZE = 4, 2, 16, 4
rng = np.random.default_rng(0)
embedding = rng.standard_normal((50, 32), dtype=np.float32)
to_q = rng.standard_normal((32, HEADS * DIM), dtype=np.float32) / 6
to_k, to_v = rng.standard_normal((2, 32, KV_HEADS * DIM), dtype=np.float32) / 6
to_logits = rng.standard_normal((HEADS * DIM, 50), dtype=np.float32)

memory = KVCacheManager(num_blocks=64, block_size=BLOCK_SIZE)
storage = KVStorage(64, BLOCK_SIZE, [LayerShape(KV_HEADS, DIM, DIM)])


def forward(tokens, slots, block_tables, lengths, query_starts):
    """The next token of each sequence; `tokens` are the new ones of all sequences in a row."""
    x = embedding[tokens]
    k, v = ((x @ weights).reshape(-1, KV_HEADS, DIM) for weights in (to_k, to_v))
    storage.write(0, k, v, slots)
    q = (x @ to_q).reshape(-1, HEADS, DIM)
    attended = storage.attend(0, q, block_tables, lengths, query_starts)
    last = attended[query_starts[1:] - 1].reshape(len(lengths), -1)
    return (last @ to_logits).argmax(axis=1)


def generate(prompts, num_tokens):
    """Continue each prompt by `num_tokens`, greedily; returns one list of tokens for each."""
    sequences, answers = [], []
    for prompt in prompts:  # one at a time here; `forward` would take them all at once
        sequence = memory.add_sequence(prompt)
        cached = memory.num_cached_tokens(sequence)
        print(f"prompt of {len(prompt)} tokens: {cached} cached")
        new = np.array(prompt[cached:])
        table, slots = memory.block_table(sequence)[None], memory.slots(sequence, cached)
        starts = np.array([0, len(new)])
        answers.append([int(forward(new, slots, table, [len(prompt)], starts)[0])])
        memory.commit([sequence])  # from here on others may find its blocks
        sequences.append(sequence)
    for _ in range(num_tokens - 1):
        tokens = np.array([answer[-1] for answer in answers])
        step = memory.extend(sequences, tokens)  # blocks only where one is full
        storage.copy_blocks(step.copies)
        following = forward(tokens, step.slots, step.block_tables, step.lengths, step.query_starts)
        memory.commit(sequences)
        for answer, token in zip(answers, following.tolist()):
            answer.append(token)
    for sequence in sequences:
        memory.free(sequence)
    return answers


if __name__ == "__main__":
    shared = [7, 1, 7, 3, 9, 9, 2, 5]
    for answer in generate([[4, 8, 15], [*shared, 11], [*shared, 30, 31]], 8):
        print(answer)
