"""A discrete-event model of vLLM engines and their KV tiers on recorded work; nothing here needs a GPU.

work         calls with their prompts as cache blocks and chunks, and what each call waits for (`work`)
engine       vLLM's scheduler, step by step, and its KV cache, block by block (`engine`, `_engine_kernel`)
tier         what LMCache keeps of the engine's KV, and who decides what enters (`tiers`)
costs        how long a step takes on a piece of hardware (`costs`)
simulation   agents in closed loops, routed to engines (`simulation`)
"""
