"""The ``octavo`` command: options, help, and what goes wrong in one line.

Owns the command line's shape and its exit codes: 0 done, 1 something that must hold did not, 2
wrong input. Knows no torch: commands import what they need when they run.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from octavo import __version__
from octavo.base import ConfigError, OctavoError
from octavo.cli.plan import explain, plan

app = typer.Typer(
    help="Long-context inference on a hybrid KV cache manager.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    # Rich's tables cut long option names in terminals of ordinary width.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="Directory with safetensors, .gguf file, or Hub id.")
]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
Length = Annotated[
    int | None,
    typer.Option(
        help="Most tokens of prompt and output. Default: what the model and the memory allow.",
        show_default=False,
    ),
]
Seqs = Annotated[int, typer.Option(help="Most requests in one step.")]
Budget = Annotated[int, typer.Option(help="Most tokens computed in one step.")]
Seed = Annotated[
    int | None,
    typer.Option(
        help="Of requests that bring none: makes sampling repeatable. Default: it differs.",
        show_default=False,
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        help="Memory for the cache, such as 2GiB. Default: a share of what is free.",
        show_default=False,
    ),
]
KvCacheDtype = Annotated[
    str, typer.Option(help="Of keys, values and latents: auto, fp32, bf16, fp16 or fp8.")
]
IndexerCacheDtype = Annotated[
    str, typer.Option(help="Of index keys: auto (as the others), fp32, bf16, fp16, fp8 or fp4.")
]
Dumps = Annotated[
    str,
    typer.Option(
        help="Folder for what is left behind where the scheduler breaks; auto is octavo's own below"
        " $XDG_STATE_HOME, none leaves nothing."
    ),
]
Report = Annotated[
    bool,
    typer.Option(
        "--report", help="Show what the cache held: by layers' kind, and beside one uniform cache."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"octavo {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """Long-context inference on a hybrid KV cache manager."""


@app.command()
def generate(
    model: Model,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="Text to continue; - reads standard input.")
    ],
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most tokens to generate.")
    ] = 128,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    top_p: Annotated[
        float, typer.Option(help="Sample among the likeliest tokens that reach this probability.")
    ] = 1.0,
    top_k: Annotated[
        int, typer.Option(help="Sample among this many likeliest tokens; 0 is all.")
    ] = 0,
    seed: Seed = None,
    stop: Annotated[
        list[str] | None,
        typer.Option(help="End at this text; may be given several times.", show_default=False),
    ] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on at the end of the text.")
    ] = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv_memory: Memory = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    indexer_cache_dtype: IndexerCacheDtype = "auto",
    max_model_len: Length = None,
    chat: Annotated[
        bool, typer.Option("--chat/--no-chat", help="Wrap the prompt in the model's chat template.")
    ] = False,
    report: Report = False,
    json: Json = False,
) -> None:
    """Continue a prompt and stream the text."""
    from octavo.cli.generate import Job, run
    from octavo.sched.sampling import SamplingParams

    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        max_tokens=max_tokens,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    text = sys.stdin.read() if prompt == "-" else prompt
    run(
        Job(model=model, prompt=text, params=params, chat=chat, report=report, json=json),
        dtype=dtype,
        device=device,
        kv_memory=kv_memory,
        kv_cache_dtype=kv_cache_dtype,
        indexer_cache_dtype=indexer_cache_dtype,
        max_model_len=max_model_len,
    )


@app.command()
def serve(
    model: Model,
    host: Annotated[
        str, typer.Option(help="Address to listen at; 0.0.0.0 is every one of this machine.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="Port to listen at; 0 takes a free one.", min=0, max=65535)
    ] = 8000,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="OCTAVO_API_KEY", help="Key that clients must send.", show_default=False
        ),
    ] = None,
    served_model_name: Annotated[
        str | None,
        typer.Option(
            help="What clients call the model. Default: its file's or folder's name.",
            show_default=False,
        ),
    ] = None,
    chat_template: Annotated[
        Path | None,
        typer.Option(
            help="File with a chat template, for a model without one.", show_default=False
        ),
    ] = None,
    answer_format: Annotated[
        str,
        typer.Option(
            help="How the model writes thoughts and calls of tools: auto goes by its chat template;"
            " docs/serving.md lists the others."
        ),
    ] = "auto",
    max_waiting: Annotated[
        int, typer.Option(help="Requests that may wait; more are refused with 429.", min=0)
    ] = 256,
    max_body: Annotated[str, typer.Option(help="Largest request body.")] = "32MiB",
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests get to finish at shutdown.", min=0)
    ] = 30.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv_memory: Memory = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    indexer_cache_dtype: IndexerCacheDtype = "auto",
    max_model_len: Length = None,
    max_num_seqs: Seqs = 64,
    max_num_batched_tokens: Budget = 2048,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching/--no-prefix-caching", help="Reuse prefixes of earlier prompts."
        ),
    ] = True,
    checkpoint_interval: Annotated[
        int | None,
        typer.Option(
            help="Tokens between regular resume points of prefixes, for layers that let go.",
            show_default=False,
        ),
    ] = None,
    eviction: Annotated[
        str,
        typer.Option(
            help="Which remembered prefixes go first: worth (what was found before and saves much"
            " for its bytes stays) or lru."
        ),
    ] = "worth",
    seed: Seed = None,
    dump_dir: Dumps = "auto",
) -> None:
    """Serve a model over HTTP, with the OpenAI API."""
    from octavo.cli.serve import Options, run

    options = Options(
        host=host,
        port=port,
        api_key=api_key,
        served_model_name=served_model_name,
        chat_template=chat_template,
        answer_format=answer_format,
        max_waiting=max_waiting,
        max_body=max_body,
        shutdown_timeout=shutdown_timeout,
    )
    run(
        model,
        options,
        dtype=dtype,
        device=device,
        kv_memory=kv_memory,
        kv_cache_dtype=kv_cache_dtype,
        indexer_cache_dtype=indexer_cache_dtype,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        enable_prefix_caching=prefix_caching,
        checkpoint_interval=checkpoint_interval,
        eviction=eviction,
        seed=seed,
        dump_dir=dump_dir,
    )


@app.command()
def bench(
    model: Model,
    concurrency: Annotated[
        int, typer.Option("--concurrency", "-c", help="Clients that each wait for their answer.")
    ] = 8,
    rate: Annotated[
        float | None,
        typer.Option(
            help="Requests a second, whether or not earlier ones are answered.", show_default=False
        ),
    ] = None,
    requests: Annotated[int, typer.Option(help="Requests in each run.")] = 32,
    input_len: Annotated[int, typer.Option(help="Tokens of every prompt.")] = 512,
    output_len: Annotated[int, typer.Option(help="Tokens of every answer.")] = 64,
    shared_len: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    runs: Annotated[int, typer.Option(help="How often to measure; the spread is over these.")] = 3,
    seed: Annotated[int, typer.Option(help="Of the prompts.")] = 0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    kv_memory: Memory = None,
    max_model_len: Length = None,
    max_num_seqs: Seqs = 64,
    max_num_batched_tokens: Budget = 2048,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File for the JSON object.", show_default=False),
    ] = None,
    json: Json = False,
) -> None:
    """Measure how fast a model answers: tokens a second, time to the first token and between
    tokens.
    """
    from octavo.cli.bench import Load, run

    load = Load(
        concurrency=concurrency,
        rate=rate,
        requests=requests,
        input_len=input_len,
        output_len=output_len,
        shared_len=shared_len,
        runs=runs,
        seed=seed,
    )
    run(
        model,
        load,
        json=json,
        output=output,
        dtype=dtype,
        device=device,
        kv_memory=kv_memory,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
    )


@app.command()
def demo(
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Most tokens to generate in each turn.")
    ] = 48,
    kv_memory: Memory = None,
    json: Json = False,
) -> None:
    """Continue a story with Gemma 3 270M in two turns, and show what the cache held and spared."""
    from octavo.cli.demo import run

    run(max_tokens=max_tokens, kv_memory=kv_memory, json=json)


@app.command()
def sim(
    seed: Annotated[
        int, typer.Option(help="First seed; with --trace, of the prefix index's keys.")
    ] = 0,
    count: Annotated[int, typer.Option(help="How many seeds to run, from --seed on.", min=1)] = 1,
    steps: Annotated[
        int | None,
        typer.Option(help="Steps with faults, before healing.", show_default=False, min=1),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "--config",
            help="A config.json or its directory; without --trace also a toy model's name, which by"
            " default is drawn from the seed.",
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(
            help="Send this traffic: a file, or a generator such as zipf:seed=3,requests=500"
            " (uniform, zipf, scans, loops, sessions, agents, phases, salts).",
            show_default=False,
        ),
    ] = None,
    memory: Annotated[
        list[str] | None,
        typer.Option(
            help="Memory for the cache, such as 80GiB; may be repeated. Default: 80GiB.",
            show_default=False,
        ),
    ] = None,
    eviction: Annotated[
        list[str] | None,
        typer.Option(help="Eviction policy; may be repeated. Default: lru.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None,
        typer.Option(help="Most requests of the trace.", show_default=False, min=1),
    ] = None,
    block_size: Annotated[
        int, typer.Option(help="Tokens that one of a trace's hash ids stands for.", min=1)
    ] = 512,
    aligned: Annotated[
        bool,
        typer.Option("--align", help="Cut prompts to whole blocks and one token of their own."),
    ] = False,
    closed: Annotated[
        int, typer.Option(help="Requests that are unfinished at any time.", min=1)
    ] = 8,
    arrivals: Annotated[
        bool,
        typer.Option("--open", help="Let requests arrive when the trace says, whatever --closed."),
    ] = False,
    speed: Annotated[
        float, typer.Option(help="With --open: they arrive so many times as fast.")
    ] = 1.0,
    step_ms: Annotated[
        float, typer.Option(help="Milliseconds that every step takes.", min=0)
    ] = 10.0,
    step_rate: Annotated[
        float, typer.Option(help="Tokens a second that a step computes besides.")
    ] = 20_000.0,
    max_running: Annotated[
        int | None,
        typer.Option(
            help="Most requests in a step. Default: --closed, or 256 with --open.",
            show_default=False,
            min=1,
        ),
    ] = None,
    budget: Annotated[int, typer.Option(help="Most tokens computed in a step.", min=1)] = 8192,
    checkpoint_interval: Annotated[
        int | None,
        typer.Option(help="Tokens between regular resume points.", show_default=False, min=1),
    ] = None,
    max_model_len: Annotated[
        int | None,
        typer.Option(help="Longest request. Default: the model's limit.", show_default=False),
    ] = None,
    profile: Annotated[
        str, typer.Option(help="Whose kernels decide block sizes: cpu or gpu.")
    ] = "gpu",
    kv_dtype: Annotated[str, typer.Option(help="bf16, fp16, fp32 or fp8.")] = "bf16",
    indexer_dtype: Annotated[
        str | None,
        typer.Option(help="Of index keys. Default: as --kv-dtype.", show_default=False),
    ] = None,
    state_dtype: Annotated[
        str, typer.Option(help="Of recurrent states and compressors: fp32 or bf16.")
    ] = "fp32",
    check: Annotated[
        bool,
        typer.Option(
            "--check",
            help="With --trace: verify every read and write; with --replay: assert every invariant"
            " after every call. Slow.",
        ),
    ] = False,
    processes: Annotated[
        int | None,
        typer.Option(
            help="Runs at once. Default: as many as processors.", show_default=False, min=1
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write one self-contained page of the hits.", show_default=False),
    ] = None,
    replay: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A dump that an engine left behind when its scheduler broke: make the same calls"
            " again. Exits with 1 where it breaks again, with 0 where it does not.",
            show_default=False,
        ),
    ] = None,
    plugin: Annotated[
        list[str] | None,
        typer.Option(
            help="With --replay: a module with kinds that the dump's model has; may be repeated.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Run the real scheduler and cache without a model: seeds of a simulated device that fails;
    with --trace, traffic of yours, to see what a cache of some size would spare; with --replay,
    what an engine did before its scheduler broke.
    """
    if replay is not None:
        from octavo.cli.sim import replay as run_again

        if trace is not None:
            raise ConfigError("trace and replay are two things: give one of them")
        run_again(replay, check=check, plugins=plugin or (), json=json)
        return
    if plugin:
        raise ConfigError("plugin is about a dump: give --replay as well")
    if trace is None:
        from octavo.cli.sim import run

        for option, given in (("memory", memory), ("eviction", eviction), ("html", html)):
            if given:
                raise ConfigError(f"{option} is about traffic: give --trace as well")
        run(first=seed, count=count, steps=steps, model=model, json=json)
        return
    from octavo.cli import traffic as command
    from octavo.sim.traffic import Load

    if model is None:
        raise ConfigError("trace needs a model: give --config with the path of a config.json")
    command.run(
        source=command.Source(trace=trace, block_size=block_size, aligned=aligned, limit=limit),
        cache=command.Cache(
            config=model,
            profile=profile,
            kv_dtype=kv_dtype,
            indexer_dtype=indexer_dtype,
            state_dtype=state_dtype,
            max_model_len=max_model_len,
        ),
        load=Load(
            closed=None if arrivals else closed,
            speed=speed,
            max_running=max_running,
            max_num_batched_tokens=budget,
            step_seconds=step_ms / 1000,
            tokens_per_second=step_rate,
            checkpoint_interval=checkpoint_interval,
            hash_seed=seed,
        ),
        memory=memory or (),
        eviction=eviction or (),
        check=check,
        processes=processes,
        json=json,
        html=html,
    )


app.command()(plan)
app.command()(explain)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line; exits with 2 and one line on standard error where the input was
    wrong.
    """
    try:
        code = app(
            args=None if argv is None else list(argv), prog_name="octavo", standalone_mode=False
        )
    except OctavoError as error:
        _refuse(str(error))
    except (KeyboardInterrupt, typer.Abort):
        raise SystemExit(130) from None
    except Exception as caught:
        # What Typer says of an option; the class depends on its version.
        usage: Any = caught
        if not hasattr(usage, "format_message"):
            raise
        if not usage.format_message():
            usage.show()
            raise SystemExit(2) from None
        _refuse(
            f"{usage.format_message().rstrip('.')}; see"
            f" {usage.ctx.command_path if usage.ctx else 'octavo'} --help"
        )
    raise SystemExit(code or 0)


def _refuse(message: str) -> NoReturn:
    Console(stderr=True, soft_wrap=True).print(
        f"[bold red]octavo:[/] {escape(message)}", highlight=False
    )
    raise SystemExit(2) from None
