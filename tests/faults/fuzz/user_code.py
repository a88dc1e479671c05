"""The user's code misbehaves in a run: reward functions, tasks and trackers raise, exit, hang, start
processes, print, close files of others, or return nonsense."""

from __future__ import annotations

import os
from random import Random

from tests.faults.fuzz.case import Case, Place
from tests.faults.mutations import choices

HEADER = """
import asyncio, atexit, ctypes, decimal, fractions, gc, json, os, signal, subprocess, sys, threading, time
from tests.faults.left import command_line
from tests.faults.once import WORKER

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

OWN = {"start_new_session": True}
"""
FUNCTION = """
def reward(prompts, completions, **given):
    if {when}:
        {body}
    return [len(text) / 10 for text in completions]
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
    subprocess.Popen(['sh', '-c', 'sleep 300 & sleep 300 &'], env={}, **OWN); raise KeyboardInterrupt
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
    prints, environ = bodies in (PRINTS, METRICS), _here(place)
    return place.train("--run.num_ranks", str(ranks), *words, prints=prints, environ=environ, about=code)


def _here(place: Place) -> dict[str, str | None]:
    return {"PYTHONPATH": os.pathsep.join([str(place.here), os.environ.get("PYTHONPATH", os.getcwd())])}


# ── tasks ───────────────────────────────────────────────────────────────────────────────────────────────────

TASK_MODULE = """
{header}
{at_import}

class Task:
    def problems(self, num, seed, split="train", **options):
        prompts = [f"[{{i + 1}},2:{{i + 3}}]" for i in range(num)]
        problems = [{{"problem_id": f"{{split}}-{{i}}", "prompt": prompts[i]}} for i in range(num)]
        {change}
        return problems

    def score(self, problem, text):
        {score}
        return {{"reward": len(text) / 10, "solved": len(text) > 5}}
    {more}

TASK = Task()
"""
TASK_FIELDS = choices(r"""
    'problem_id' | 'prompt' | 'messages' | 'prompt_ids' | 'task' | 'x' | '' | None | 1 | 'completion_ids'
    'reward' | 'numbers' | 'log_metric' | '\ud800' | '\x1b[31m'
""")
TASK_VALUES = choices(r"""
    None | 1 | '' | [] | {} | '\ud800' | 'a\x00b' | '\x1b[31m' | 'x' * 100_000 | '../../x' | 'a\nb' | b'1'
    1e308 | float('nan') | {1, 2} | object() | print | [1, 2, 3] | [10**9] | [-1] | [1.5] | [True] | ['1']
    range(3) | Odd | [{'role': 'user', 'content': 'x'}] | [{'role': None}] | [[]] | [{}] | 10**400
    numpy('int64(1)') | iter([1]) | ' '
""")
TASK_CHANGES = choices("""
    problems = None | problems = [] | problems = {} | problems = iter(problems) | problems = problems[:1]
    problems *= 2 | problems[0] = None | problems[0] = [] | problems[0] = 'x' | problems[-1] = problems[0]
    problems[0] = {} | problems = 'abc' | problems[0]['problem_id'] = os.getpid()
    problems[1]['prompt'] += str(time.time()) | problems.append(problems) | print('x' * 10**6)
    os.chdir('/') | problems = problems * 1000 | problems[0].clear() | yield from problems
""")
TASK_AT_IMPORT = choices(r"""
    raise ImportError('odd') | import no_such_module | raise KeyError | raise SystemExit(3) | raise Odd
    def | x = '\ud800'.encode() | __getattr__ = lambda name: 1 / 0 | print('x' * 10**6)
    if IS_WORKER: os._exit(3) | if IS_WORKER: raise KeyboardInterrupt | if IS_WORKER: os.fork()
    if IS_WORKER: subprocess.Popen(['sleep', '300'], start_new_session=True) | deep(0) | raise BaseException
    if IS_WORKER: time.sleep(2) | threading.Thread(target=time.sleep, args=(1,)).start()
    os.environ['RANK'] = 'x'
""")
TASK_MORE = choices("""
    def __getattr__(self, name): raise Odd | def __getattr__(self, name): return self | warm_up = 1
    __slots__ = () | def warm_up(self, options): raise KeyboardInterrupt
    def warm_up(self, options): os._exit(1) | score = None | problems = 3
    def warm_up(self, options): time.sleep(2) | def warm_up(self): pass | def score(self): pass
    def problems(self): pass | async def score(self, problem, text): return {'reward': 1, 'solved': True}
    def warm_up(self, options): print('x' * 10**6)
""")
VERDICTS = choices("""
    None | 1.0 | {} | {'reward': 1} | {'solved': True} | {'reward': '1', 'solved': True}
    {'reward': None, 'solved': None} | {'reward': 1, 'solved': 'no'} | {'reward': 1, 'solved': []}
    {'reward': 1e308, 'solved': 2} | {'reward': Odd, 'solved': Odd}
    {'reward': OddNumber(), 'solved': True} | {'reward': 1, 'solved': numpy('array([1, 2])')}
    {'reward': 1j, 'solved': 1}
""")


def tasks(place: Place, rng: Random) -> Case:
    """A task is odd in one respect."""
    parts = {"at_import": "", "change": "", "score": "", "more": ""}
    match rng.randrange(7):
        case 0:
            parts["at_import"] = rng.choice(TASK_AT_IMPORT)
        case 1 | 2:
            parts["change"] = (
                f"problems[{rng.choice((0, -1))}][{rng.choice(TASK_FIELDS)}] = {rng.choice(TASK_VALUES)}"
            )
        case 3:
            parts["change"] = rng.choice((*TASK_CHANGES, *RAISES))
        case 4:
            parts["more"] = rng.choice(TASK_MORE)
        case 5:
            parts["score"] = rng.choice((*RAISES, *ENDS, *STARTS))
        case _:
            parts["score"] = f"return {rng.choice((*VERDICTS, *RETURNS))}"
    place.write("odd_tasks.py", TASK_MODULE.format(header=HEADER + HELPERS, **parts))
    words = ("--task.name", "odd_tasks:TASK", "--task.options", "{}", "--rewards.timeout_seconds", "1")
    prints = "print(" in "".join(parts.values())
    return place.train(*words, prints=prints, codes=frozenset({0, 2, 130}), about=str(parts))


# ── trackers ────────────────────────────────────────────────────────────────────────────────────────────────

TRACKER_MODULE = """
{header}
{at_import}
completions, given, prompts = [""], {{}}, []

class Tracker:
    def __init__(self):
        {init}
    def begin(self, run):
        {begin}
        return "somewhere"
    def log(self, step, values):
        {log}
    def finish(self):
        {finish}
    {more}
"""
TRACKER_ANSWERS = choices(r"""
    None | 1 | 'x' * 10**6 | '\x1b[2J' | 'a\nb' | '\ud800' | object() | Odd | b'x' | [] | OddNumber()
    lambda: 1
""")
TRACKER_AT_IMPORT = choices("""
    raise ImportError('odd') | raise SystemExit(1) | import no_such_module | raise KeyError
    print('x' * 10**6) | 1 / 0
""")
TRACKER_MORE = choices("""
    begin = None | log = 3 | def log(self): pass | async def begin(self, run): return 'x'
    def __getattr__(self, name): raise Odd
""")
TRACKER_SLOW = ("time.sleep(100)", "threading.Event().wait()", "signal.pause()")
"""They are waited for a minute at the end of a run: played in one case of twenty."""


def trackers(place: Place, rng: Random) -> Case:
    """A tracker is odd in one respect."""
    parts = {"at_import": "", "init": "pass", "begin": "pass", "log": "pass", "finish": "pass", "more": ""}
    where = rng.choice(
        ("at_import", "init", "begin", "begin", "log", "log", "finish", "finish", "more", "answer")
    )
    bodies = (*RAISES, *ENDS, *STARTS, *STARTS, *CLOSES, *PRINTS)
    bodies = tuple(body for body in bodies if body not in TRACKER_SLOW and "SIGSTOP" not in body)
    if where in ("at_import", "more"):
        parts[where] = rng.choice(TRACKER_AT_IMPORT if where == "at_import" else TRACKER_MORE)
    elif where == "answer":
        parts["begin"] = f"return {rng.choice(TRACKER_ANSWERS)}"
    else:
        parts[where] = rng.choice(TRACKER_SLOW if rng.random() < 0.05 else bodies)
    place.write("odd_trackers.py", TRACKER_MODULE.format(header=HEADER + HELPERS, **parts))
    use = "odd_trackers" + rng.choice((":Tracker",) * 6 + (":Odd", ":deep", "", ":x"))
    return place.train("--tracking.use", use, prints="print(" in "".join(parts.values()), about=str(parts))
