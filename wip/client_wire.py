"""The shared edits, each the smallest."""
import re
def edit(p, *pairs):
    s=open(p).read()
    for a,b in pairs:
        assert s.count(a)==1, (p,a,s.count(a))
        s=s.replace(a,b)
    open(p,'w').write(s)
s=open('outrider/traffic/answer.py').read()
i=s.index("class Events:"); j=s.index("@dataclass(slots=True)\nclass Answer")
s=s[:i]+s[j:]
s=s.replace("import codecs\nimport io\nimport json","import json").replace("from collections.abc import Iterator, Mapping","from collections.abc import Mapping")
s=s.replace("\nEvents are read as in the HTML standard, 9.2.6, server-sent events.\n","")
open('outrider/traffic/answer.py','w').write(s)
edit('outrider/traffic/connection.py',("from outrider.traffic.answer import Answer, Events\n","from outrider.traffic.answer import Answer\n"))
s=open('outrider/traffic/connection.py').read()
m=re.search(r"^from outrider\.[d-z]",s,re.M)
s=s[:m.start()]+"from outrider.client.events import Events\n"+s[m.start():]
open('outrider/traffic/connection.py','w').write(s)
edit('tests/traffic/test_replay.py',("from outrider.traffic.answer import Answer, Events\n","from outrider.traffic.answer import Answer\n"),("from outrider.cli.replay import replay as verb\n","from outrider.cli.replay import replay as verb\nfrom outrider.client.events import Events\n"))
edit('outrider/cli/__init__.py',('''        "serve": ("serve", "Serve a target and its drafter to OpenAI's clients"),
''','''        "serve": ("serve", "Serve a target and its drafter to OpenAI's clients"),
        "ask": ("ask", "Ask a server, by prompt or by file, and what it cost"),
'''))
edit('tests/test_surface.py',('"outrider.gate.verdict", "outrider.traffic.replay",','"outrider.gate.verdict", "outrider.client", "outrider.traffic.replay",'),('''        "serve", "keys",
''','''        "serve", "keys", "ask",
'''))
edit('pyproject.toml',('''    "outrider.decoding",
    "outrider.config | outrider.demo",
''','''    "outrider.decoding",
    "outrider.client",
    "outrider.config | outrider.demo",
'''),('''source_modules = ["outrider.config", "outrider.errors", "outrider.demo"]''','''source_modules = ["outrider.config", "outrider.errors", "outrider.demo", "outrider.client"]'''),
('''    "outrider.machine", "outrider.kernels", "outrider.prepacked", "outrider.config", "outrider.demo",''','''    "outrider.client", "outrider.machine", "outrider.kernels", "outrider.prepacked", "outrider.config", "outrider.demo",'''))
edit('docs/index.md',('''| [replay.md](replay.md)''','''| [client.md](client.md) | ask servers with OpenAI's API: retries, budgets, costs, files of prompts |
| [replay.md](replay.md)'''))
edit('docs/architecture.md',('''| `config.py`, `errors.py` | known to all |
''','''| `client` | asks servers with OpenAI's API; knows no torch |
| `config.py`, `errors.py` | known to all |
'''))
edit('README.md',('''  ([docs/serve.md](docs/serve.md)).
''','''  ([docs/serve.md](docs/serve.md)); `outrider ask` and `outrider.client` ask such servers within a
  budget ([docs/client.md](docs/client.md)).
'''))
edit('CHANGELOG.md',('''- Every setting has a docstring with its unit. From these come''','''- `outrider.client` asks servers with OpenAI's API, whole or in streams: time-outs by phase, retries with jitter before an answer began and
  never after, rates, a breaker, a budget that is never passed, exact costs by a table of prices, a cache. `outrider ask` sends a prompt, or a
  file of them with progress and resume. `docs/client.md`. `traffic.answer.Events` is `client.events.Events`.
- Every setting has a docstring with its unit. From these come'''))
