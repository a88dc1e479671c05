"""A user's reward function does what it should not, in the middle of a run: it raises, ends, hangs, starts
others, prints, closes what is not its own, and returns what is no reward."""

from __future__ import annotations

import os
from random import Random

from benchmarks.faults.fuzz.case import Case, Place
from benchmarks.faults.mutations import choices

HEADER = """
import asyncio, atexit, ctypes, decimal, fractions, gc, json, os, signal, subprocess, sys, threading, time
from benchmarks.faults.left import command_line
from benchmarks.faults.once import WORKER

IS_WORKER = WORKER in command_line(os.getpid())

class Odd(Exception):
    def __str__(self): raise ValueError("no text either")
    __repr__ = __str__

class OddNumber:
    def __float__(self): raise SystemExit(3)
    def __repr__(self): raise KeyboardInterrupt

class Endless:
    def __iter__(self):
        while True:
            yield 1.0

def deep(n): return deep(n + 1)
"""
FUNCTION = """
def reward(prompts, completions, **given):
    if {when}:
        {body}
    return [len(completions[0]) / 10]
"""
ASYNC_FUNCTION = FUNCTION.replace("def reward", "async def reward")
WHEN = (
    "True",
    "True",
    "len(completions[0]) % 2",
    "given['trainer_state'].global_step > 0",
    "os.getpid() % 2",
)
RAISES = choices(r"""
    raise Exception('odd') | raise BaseException('odd') | raise KeyboardInterrupt('odd')
    raise SystemExit('odd') | raise GeneratorExit('odd') | raise StopIteration('odd')
    raise MemoryError('odd') | raise RecursionError('odd') | raise OSError('odd')
    raise BrokenPipeError('odd') | raise EOFError('odd') | raise Odd | raise SystemExit(0)
    raise SystemExit(None) | raise TimeoutError | raise asyncio.CancelledError | deep(0)
    raise ExceptionGroup('many', [ValueError(1), KeyError(2)]) | raise Exception('x' * 10**6)
    raise Exception('\x1b[2J\x1b]0;title\x07 and \r more') | raise Exception('\ud800 \u202e é')
    raise Exception('a\nb\nc') | raise UnicodeDecodeError('utf-8', b'\xff', 0, 1, 'odd')
    json.loads('[' * 10**5) | assert False | 1 / 0 | sys.exit('odd')
""")
ENDS = choices("""
    os._exit(0) | os._exit(1) | os._exit(255) | os.abort() | ctypes.string_at(0)
    signal.alarm(1); time.sleep(3) | os.kill(os.getpid(), signal.SIGKILL); time.sleep(3)
    os.kill(os.getpid(), signal.SIGTERM); time.sleep(3) | os.kill(os.getpid(), signal.SIGINT); time.sleep(3)
    os.kill(os.getpid(), signal.SIGHUP); time.sleep(3) | os.kill(os.getpid(), signal.SIGSEGV); time.sleep(3)
    os.kill(os.getpid(), signal.SIGSTOP); time.sleep(3) | time.sleep(100) | threading.Event().wait()
    signal.pause()
""")
STARTS = choices("""
    os.fork() | os.fork() or time.sleep(300) | os.fork() or os._exit(0) | subprocess.Popen(['sleep', '300'])
    subprocess.Popen(['sleep', '300'], start_new_session=True)
    subprocess.Popen(['sleep', '300']); os._exit(0)
    subprocess.Popen(['sleep', '300'], start_new_session=True); os.kill(os.getpid(), signal.SIGKILL)
    subprocess.Popen(['sh', '-c', 'sleep 300 & sleep 300 &'], start_new_session=True, env={}); raise KeyboardInterrupt
    subprocess.Popen(['sh', '-c', 'trap : TERM INT HUP; sleep 300'])
    os.fork() or (os.setsid(), os.fork() and os._exit(0), time.sleep(300))
    threading.Thread(target=time.sleep, args=(300,)).start() | atexit.register(time.sleep, 300)
""")
PRINTS = choices(r"""
    print('x' * 5_000_000) | print('x\n' * 100_000, file=sys.stderr) | os.write(1, b'\xff' * 100_000)
    print('\x1b[31mred') | [os.write(n, b'garbage' * 9) for n in range(3, 64) if can_write(n)]
    sys.stdout.close() | print('Loss: 1', flush=True)
""")
CLOSES = choices("""
    os.closerange(0, 3) | os.closerange(3, 256) | os.closerange(0, 256) | os.chdir('/') | os.environ.clear()
    gc.disable() | sys.setrecursionlimit(50) | sys.path.clear()
    signal.signal(signal.SIGTERM, signal.SIG_IGN) | os.umask(0o777) | sys.modules.clear() | given.clear()
    prompts.clear() | sys.stdout = sys.stderr = None | os.setsid() if False else None
""")
RETURNS = choices("""
    None | [] | [None] | ['1'] | [b'1'] | [float('nan')] | [float('inf')] | [-float('inf')] | [1e308]
    [-1e308] | [10**400] | [True] | [[1]] | [{}] | 1 | 1.0 | '1' | (x for x in [1.0]) | [1, 2] | [1] * 10**6
    {1.0} | {1.0: 2} | [decimal.Decimal('1e999')] | [decimal.Decimal('NaN')] | [fractions.Fraction(1, 3)]
    [1j] | [OddNumber()] | Endless() | [5e-324] | [1e300] | [-0.0] | range(1) | memoryview(b'1')
    [object()] | [print] | lambda: [1.0] | NotImplemented | numpy('array([1.0])') | numpy('array([[1.0]])')
    numpy('float32(1)') | numpy('array("1")') | numpy('array([1e308])')
""")
METRICS = choices(r"""
    given['log_metric']('a', float('nan')) | given['log_metric'](None, '1')
    given['log_metric']('\x1b[31m', 1e308) | [given['log_metric'](str(n), n) for n in range(10_000)]
    given['log_metric']('a', object()) | given['log_extra']('a', 1) | given['log_metric']('\ud800', 1)
    given['log_metric']('x' * 10**5, True) | given['log_metric']('a', 10**400)
""")
COROUTINES = choices("""
    await asyncio.sleep(100) | asyncio.current_task().cancel(); await asyncio.sleep(1)
    asyncio.run(asyncio.sleep(0)) | asyncio.get_running_loop().stop(); await asyncio.sleep(1)
    time.sleep(100) | raise KeyboardInterrupt | raise BaseException | await asyncio.Event().wait()
    asyncio.create_task(asyncio.sleep(300)) | return asyncio.sleep(0) | raise asyncio.CancelledError
    await None | os.fork() | os._exit(1) | asyncio.get_running_loop().close()
    return await asyncio.to_thread(time.sleep, 100)
""")
HELPERS = """
def can_write(n):
    try:
        import fcntl
        return fcntl.fcntl(n, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDONLY
    except OSError:
        return False

def numpy(text):
    import numpy
    return eval("numpy." + text)
"""


def rewards(place: Place, rng: Random, ranks: int = 1) -> Case:
    """A reward function is odd whenever it is called, or now and then."""
    bodies = rng.choice(
        (RAISES, RAISES, ENDS, STARTS, STARTS, PRINTS, CLOSES, RETURNS, RETURNS, RETURNS, METRICS, COROUTINES)
    )
    body = rng.choice(bodies)
    function = ASYNC_FUNCTION if bodies is COROUTINES else FUNCTION
    code = function.format(when=rng.choice(WHEN), body=f"return {body}" if bodies is RETURNS else body)
    place.write("odd_rewards.py", HEADER + HELPERS + code)
    functions = rng.choice(("odd_rewards:reward", "odd_rewards:reward", "task,odd_rewards:reward"))
    num = rng.choice(("1", "2"))
    words = ["--rewards.functions", functions, "--rewards.timeout_seconds", "1", "--rewards.num_workers", num]
    if bodies in (RETURNS, METRICS) and rng.random() < 0.3:
        words[-1] = "0"
    return place.train(
        "--run.num_ranks",
        str(ranks),
        *words,
        prints=bodies in (PRINTS, METRICS),
        environ=_here(place),
        about=code,
    )


def _here(place: Place) -> dict[str, str | None]:
    return {"PYTHONPATH": os.pathsep.join([str(place.here), os.environ.get("PYTHONPATH", os.getcwd())])}
