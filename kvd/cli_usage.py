"""What `kvd --help` and `kvd COMMAND --help` print. A leaf; the settings of `serve` are added by `cli`."""

from __future__ import annotations

from collections.abc import Mapping

USAGE = """\
usage: kvd [serve] [MODEL] [-c FILE] [flags]   serve a model over HTTP
       kvd chat [--url A]                      talk to an endpoint in the terminal
       kvd top [URL]                           watch a kvd that runs elsewhere
       kvd doctor [URL]                        say why prompts missed the cache
       kvd plan [MODEL] [flags]                say what fits, before anything is loaded
       kvd check [MODEL] [-c FILE] [flags]     check a configuration and print it
       kvd models                              list the models that kvd knows by name
       kvd convert SRC DST                     make a 4-bit AWQ directory of a 16-bit model
       kvd eval MODEL                          measure perplexity and what the KV format costs
       kvd bench [--url A] [--against B]       measure endpoints over HTTP
       kvd profile [URL]                       measure memory and latency by context
       kvd version                             print the version

`kvd COMMAND --help` explains each. Without a command, kvd serves.
"""

SERVE_USAGE = """\
usage: kvd [serve] [MODEL] [-c FILE] [flags]

Serve a model on http://127.0.0.1:8000/v1 with a dashboard in the terminal. A first SIGINT or SIGTERM lets
running requests finish, a second one ends them. Every flag is also a key of the file; flags win. Most of vLLM's
flags are understood.

  -c FILE, --config FILE
      Read settings from a YAML file.

"""

CHAT_USAGE = """\
usage: kvd chat [--url A] [--key KEY] [--model NAME] [--system TEXT]

Talk to an OpenAI-compatible endpoint. Ctrl-C stops an answer, Ctrl-D leaves, /help lists the commands. In a pipe it
reads one question from stdin and writes the answer to stdout.

  --url A
      Base URL, with or without /v1 (default: http://127.0.0.1:8000/v1).
  --key KEY
      Also KVD_API_KEY in the environment.
  --model NAME
      What to ask for (default: the first that /v1/models lists).
  --system TEXT
      The system message.
"""

TOP_USAGE = """\
usage: kvd top [URL] [--key KEY] [--once] [--json] [--readonly] [--ascii] [--interval S] [--show-prompts]

Show the dashboard of a running kvd. It stays up when the server restarts; q or Ctrl-C closes it. Without a terminal
it prints the state once.

  URL
      Base URL, with or without /v1 (default: http://127.0.0.1:8000/v1).
  --key KEY
      Also KVD_API_KEY in the environment.
  --once
      Print the state as plain text of 80 columns, and end.
  --json
      Print one snapshot as a JSON object, and end.
  --readonly
      Refuse whatever would change something on the server.
  --ascii
      Draw with ASCII characters alone. NO_COLOR in the environment takes the colours away.
  --interval S
      Seconds between two snapshots, 0.1 to 60 (default: 0.5).
  --show-prompts
      Show prompt text without a key press; the server must have it on, too.
"""

DOCTOR_USAGE = """\
usage: kvd doctor [URL] [--key KEY] [--json] [--show-prompts]

Say why prompts missed the cache of a running kvd, ranked by the tokens that were computed again: what to change, and
the time to first token that it would save.

  URL
      Base URL, with or without /v1 (default: http://127.0.0.1:8000/v1).
  --key KEY
      Also KVD_API_KEY in the environment.
  --json
      Print the report as one JSON object.
  --show-prompts
      Show the text around the place where prompts differ; the server must have it on, too.
"""

PLAN_USAGE = """\
usage: kvd plan [MODEL] [-c FILE] [flags of `kvd serve`] [--gpu NAME | --memory SIZE] [flags]
       kvd plan --layers N --kv-heads N --head-dim N [sizes] [--gpu NAME | --memory SIZE] [flags]
       kvd plan --from URL [flags]

Say what fits before anything is loaded: where the memory goes, requests at once by context and KV dtype, the largest
max_model_len. Reads config.json and the headers of weights, and downloads nothing. Without --gpu and --memory it plans
for this machine, as `kvd serve` would find it. Exit code 1 where it does not fit.

  --gpu NAME
      Plan for a card: rtx-3060-12gb, rtx-3080-10gb, rtx-3090, rtx-4060-ti-16gb, rtx-4070-ti-super, rtx-4080, rtx-4090,
      rtx-5070-ti, rtx-5080, rtx-5090, rtx-a4000, rtx-a5000, rtx-a6000, rtx-6000-ada, rtx-pro-6000-blackwell, l4, l40s,
      a10, a100-40gb, a100-80gb, h100-80gb, h200.
  --memory SIZE
      Plan for a card of that memory, such as 24GiB; with --device cpu for so much free RAM.
  --requests NxTOKENS
      Whether so many requests of so many tokens each fit at once: 8x4096, 64x2K.
  --from URL
      Plan for a server that runs, with the lengths that it has seen; flags of `kvd serve` change its settings. Any
      address but this machine's needs --allow-remote.
  --json
      Print one JSON object.
  --chart FILE.svg
      Draw the memory, and requests at once by context.

A model by numbers:

  --layers N, --kv-heads N, --head-dim N
      What the KV cache depends on.
  --heads N, --hidden N, --intermediate N, --vocab N, --positions N
      The other sizes; what is left out is assumed, and said.
  --parameters N
      Count the weights by their number: 7B, 135M; --quantization awq or gguf says that they have 4 bits.
  --window N, --windowed-layers N
      Tokens that a query sees in all layers, or in so many of them.
"""

CHECK_USAGE = """\
usage: kvd check [MODEL] [-c FILE] [flags] [--json]

Check a configuration, without loading anything, and print every setting with its value and where that came from.
Takes every flag of `kvd serve`.

  --json
      Print one JSON object: settings, origins, notices.
"""

MODELS_USAGE = """\
usage: kvd models [--json]

List the models that kvd knows by name: size, licence, whether on disk.

  --json
      Print a JSON list.
"""

CONVERT_USAGE = """\
usage: kvd convert SRC DST [--bits 4] [--group-size G] [--no-scaling] [--json]

Make a 4-bit AWQ directory DST, which other AWQ readers accept too, from SRC: a .gguf file or a directory with
16-bit safetensors. Prints the perplexity before and after.

  --bits 4
      Bits per weight; only 4.
  --group-size G
      Input channels that share a scale: 32, 64 or 128 (default: 128).
  --no-scaling
      Round to nearest, without activation-aware scaling.
  --json
      Print what was made as one JSON object.
"""

EVAL_USAGE = """\
usage: kvd eval MODEL [--kv-cache-dtype TYPE] [--text FILE] [--tokens N] [--json]

Measure how well MODEL predicts a text as kvd serves it, and how far its KV cache format is from 16 bits.

  --kv-cache-dtype TYPE
      The format to judge: auto, int8, fp16 or bf16 (default: auto).
  --text FILE
      The text, UTF-8; without it, one that comes with kvd.
  --tokens N
      Use the first N tokens only.
  --json
      Print one JSON object; passes_gate says whether the format is close enough.
"""

BENCH_USAGE = """\
usage: kvd bench --url A [--model NAME] [--against B] [flags]
       kvd bench [MODEL] [-c FILE] [flags of `kvd serve`] [--against B] [flags]

Measure an OpenAI-compatible endpoint over HTTP; with --against a second one in alternation, under the same load.
Without --url, kvd itself is started with the flags that are given, and stopped afterwards.

  --url A, --against B
      Base URLs, with or without /v1. B is measured in turns with A; ratios are A ÷ B, run by run.
  --model NAME, --model-against NAME
      What to ask A and B for (default: the first that /v1/models lists).
  --api-key KEY, --api-key-against KEY
      Also KVD_API_KEY and KVD_API_KEY_AGAINST in the environment.
  --allow-remote
      Allow endpoints on other machines.
  --only NAME,…
      Some loads only: single, prefill-512, prefill-4k, streams-8, streams-16, ttft, sweep, documents.
  --runs N
      Counted runs of every load (default: 5); a warm-up comes before them.
  --tokens N
      Length of every answer (default: 128 tokens for a single stream, 64 elsewhere).
  --context N
      Context in tokens of an endpoint that does not say it.
  --timeout SECONDS
      Longest wait for the next bytes of an answer (default: 600).
  --prompt-seed N
      Make the same prompts as another benchmark; its --json has the seed (default: new ones).
  --json FILE
      Write everything, raw samples included, as one JSON object; - is stdout, and the table goes to stderr.
  --picture FILE.svg
      Draw bars of the loads, and the curve of the sweep with its knee.
"""

PROFILE_USAGE = """\
usage: kvd profile [URL] [--model NAME] [--key KEY] [flags]
       kvd profile MODEL [-c FILE] [flags of `kvd serve`] [flags]

Measure what one request takes, by the length of its context: bytes of the KV cache, time to first token cold and warm,
time between tokens, and what each token more adds to them. With a MODEL, or a flag of `kvd serve`, kvd itself is
started, and stopped afterwards.

  URL
      Base URL of a server that runs, with or without /v1 (default: http://127.0.0.1:8000).
  --model NAME
      What to ask it for (default: the first that /v1/models lists).
  --key KEY
      Also KVD_API_KEY in the environment.
  --allow-remote
      Allow a server on another machine.
  --kv-cache-dtype TYPE,…
      Start kvd with one KV format after the other, and show them side by side.
  --lengths N,…
      Tokens of the contexts, prompt and answer together (default: 256,2048,8192). What does not fit is left out.
  --tokens N
      Length of every answer (default: 32 tokens).
  --runs N
      Counted runs of every length (default: 5); a warm-up comes before them.
  --timeout SECONDS
      Longest wait for the next bytes of an answer (default: 600).
  --prompt-seed N
      Make the same prompts as another profile; its --json has the seed (default: new ones).
  --compare OLD.json
      Say what has changed since an earlier --json, and whether that is more than noise.
  --json FILE
      Write everything, raw samples included, as one JSON object; - is stdout, and the table goes to stderr.
  --picture FILE.svg
      Draw memory and latency against tokens.
"""

VERSION_USAGE = """\
usage: kvd version

Print the version.
"""


USAGES: Mapping[str, str] = {
    "serve": SERVE_USAGE,
    "chat": CHAT_USAGE,
    "top": TOP_USAGE,
    "doctor": DOCTOR_USAGE,
    "plan": PLAN_USAGE,
    "check": CHECK_USAGE,
    "models": MODELS_USAGE,
    "convert": CONVERT_USAGE,
    "eval": EVAL_USAGE,
    "bench": BENCH_USAGE,
    "profile": PROFILE_USAGE,
    "version": VERSION_USAGE,
}
