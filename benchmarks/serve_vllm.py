"""vLLM's CPU build, as its offline API starts it: an engine core of its own process, stepped from here."""

from pathlib import Path


def tuned(environment, prefix):
    """Return an environment with what its manual says to tune a CPU by: threads, and libraries to preload.

    As it comes it leaves a core to its server, and would be compared, with a thread fewer, to engines that
    use all of them.

    Args:
        prefix: where its interpreter is installed, with the libraries beside it.
    """
    threads = int(environment["OMP_NUM_THREADS"])
    found = [str(path) for path in (prefix / "lib" / "libiomp5.so",) if path.exists()]
    found += [str(path) for path in _tcmalloc(prefix)]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}" if threads > 1 else "0",
        "LD_PRELOAD": ":".join(found),
        **environment,
    }


def _tcmalloc(prefix):
    for folder in (prefix / "lib", Path("/usr/lib/x86_64-linux-gnu")):
        if found := sorted(folder.glob("libtcmalloc_minimal.so.?")):
            return found[:1]
    return []


class Vllm:
    """Answers of exactly so many tokens."""

    def __init__(self, folder, dtype, **options):
        from vllm import LLM, SamplingParams
        from vllm.sampling_params import RequestOutputKind

        self._params, self._delta = SamplingParams, RequestOutputKind.DELTA
        self._llm = LLM(
            str(folder), dtype=dtype, skip_tokenizer_init=True, max_model_len=2048,
            enable_prefix_caching=False, disable_log_stats=True,
            **{"gpu_memory_utilization": 0.2, **options},
        )  # fmt: skip
        self._engine = self._llm.llm_engine
        self.num_open = 0

    @property
    def has_work(self):
        """Whether any request has not ended."""
        return self.num_open > 0

    def add(self, index, prompt, max_tokens):
        """Queue a request."""
        params = self._params(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, output_kind=self._delta
        )
        self._engine.add_request(str(index), {"prompt_token_ids": prompt}, params)
        self.num_open += 1

    def step(self):
        """Return the indices that got a token."""
        got = []
        for output in self._engine.step():
            got += [int(output.request_id.split("-")[0])] * len(output.outputs[0].token_ids)
            self.num_open -= output.finished
        return got
