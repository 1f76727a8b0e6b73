"""``mla-compile serve`` with what ``pip install ".[server]"`` brings, and no more: a tiny model answers one request.

The tests have more installed than a user, and so see no requirement that the extra lacks.
"""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

WORDS = 64
READY_S = 180


def save(folder: str) -> None:
    """A model with latent attention, and a tokenizer with a word for each token."""
    import tokenizers
    from transformers import MiniCPM3Config, MiniCPM3ForCausalLM, PreTrainedTokenizerFast

    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    latent = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
    config = MiniCPM3Config(vocab_size=WORDS, num_key_value_heads=2, max_position_embeddings=256, **sizes, **latent)
    MiniCPM3ForCausalLM(config).save_pretrained(folder)
    known = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{n}": n for n in range(WORDS)}, "w3"))
    known.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=known).save_pretrained(folder)


def answered(address: str, path: str, body: dict[str, object] | None = None) -> str | None:
    """What it answers with 200, or None."""
    data = None if body is None else json.dumps(body).encode()
    try:
        with urlopen(Request(address + path, data, {"content-type": "application/json"}), timeout=30) as answer:
            return str(answer.read().decode())
    except (URLError, ConnectionError):
        return None


def main() -> None:
    """Raise ``SystemExit`` with a message where it does not serve."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        save(folder)
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        command = str(Path(sys.executable).with_name("mla-compile"))
        options = ("--codegen", "eager", "--num-blocks", "8", "--max-num-seqs", "2", "--served-model-name", "tiny")
        server = subprocess.Popen([command, "serve", folder, "--port", str(port), *options])
        try:
            address, end = f"http://127.0.0.1:{port}", time.monotonic() + READY_S
            while answered(address, "/health") is None:
                if server.poll() is not None or time.monotonic() > end:
                    raise SystemExit("the server is not ready")
                time.sleep(0.2)
            said = answered(address, "/v1/completions", {"prompt": "w7 w8", "max_tokens": 4, "temperature": 0})
            if said is None or json.loads(said)["usage"]["total_tokens"] != 6:
                raise SystemExit(f"the server answers {said}")
            server.send_signal(signal.SIGTERM)
            if server.wait(timeout=60) != 0:
                raise SystemExit(f"the server ends with {server.returncode}")
        finally:
            server.kill()
        print("serves")


if __name__ == "__main__":
    main()
