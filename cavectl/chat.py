"""The interactive chat: a loop of messages and slash commands around one conversation.

A failed or cancelled request never ends the loop. The conversation only takes in what was answered: after a failure the message
stays aside for /retry; after Ctrl-C the part of the answer that was seen stays.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

from cavectl.answer import Answer, Message, Question, stream_answer
from cavectl.client import Client
from cavectl.commands.models import describe
from cavectl.commands.run import print_remarks
from cavectl.editor import Editor, held_keys
from cavectl.environment import Environment
from cavectl.options import set_option
from engine.errors import CavectlError, InvalidRequest

HELP = """\
/set parameter NAME VALUE  a sampling option, such as temperature 0.2
/set system TEXT           the system message
/set verbose | quiet       timings after each answer, or none
/set history | nohistory   whether what you type is kept for the next chat
/show info | license | parameters | system
/load MODEL                go on with another model; the conversation stays
/clear                     forget the conversation
/retry                     send the last message again that failed
/bye, /exit, Ctrl-D        leave
/?, /help                  this

Ctrl-C stops an answer. Ctrl-J begins a new line; so does Enter inside \"\"\" ... \"\"\"."""


class Chat:
    """One conversation at a terminal."""

    def __init__(self, environment: Environment, client: Client, question: Question, *, verbose: bool) -> None:
        self._environment = environment
        self._console = environment.console
        self._client = client
        self._question = question
        self._verbose = verbose
        self._messages: list[Message] = []
        self._failed = ""  # the message whose request failed
        self._editor = Editor(environment.settings.data_dir / "history", self._console.colour)

    def run(self) -> None:
        """Read and answer until /bye or Ctrl-D."""
        self._warm_up()
        with held_keys():
            while not self._turn():
                pass

    def _turn(self) -> bool:
        """One thing typed and what comes of it; True when the chat is over."""
        try:
            text = self._editor.read()
        except KeyboardInterrupt:
            self._console.note("Ctrl-D or /bye leaves")
            return False
        except EOFError:
            return True
        if text.startswith("/"):
            return self._command(text.strip())
        if text.strip():
            self._say(text)
        return False

    def _warm_up(self) -> None:
        """Load the model while the person types. What goes wrong here is said when the first message needs it."""

        def load() -> None:
            with suppress(CavectlError):
                self._client.post(*self._question.load(), timeout_s=None)

        threading.Thread(target=load, name="warm-up", daemon=True).start()

    def _say(self, text: str) -> None:
        """Send a message and stream its answer."""
        asked: Message = {"role": "user", "content": text}
        answer = Answer()
        self._failed = ""
        try:
            stream_answer(self._client, self._question.chat([*self._messages, asked]), self._console, answer)
        except KeyboardInterrupt:
            self._console.note("stopped")
            if not answer.text:
                return
        except CavectlError as error:
            self._failed = text
            self._console.error(error)
            self._console.note("/retry sends your message again")
            return
        self._messages += [asked, {"role": "assistant", "content": answer.text}]
        if answer.final:
            self._after(answer)

    def _after(self, answer: Answer) -> None:
        print_remarks(self._console, self._client, answer, "text" if self._verbose else None, remedy="/clear starts over")
        self._console.line()

    def _command(self, line: str) -> bool:
        """Carry out a slash command; True when the chat is over."""
        name, _, rest = line.partition(" ")
        if name in ("/bye", "/exit"):
            return True
        commands: dict[str, Callable[[str], None]] = {
            "/?": self._help,
            "/help": self._help,
            "/set": self._set,
            "/show": self._show,
            "/load": self._load,
            "/clear": self._clear,
            "/retry": self._retry,
        }
        try:
            if name not in commands:
                raise InvalidRequest(f"no command {name}", hint="/? lists them; to send it as a message, begin it with a space")
            commands[name](rest.strip())
        except CavectlError as error:
            self._console.error(error)
        except KeyboardInterrupt:
            self._console.note("stopped")
        return False

    def _help(self, _: str) -> None:
        self._console.line(HELP)

    def _set(self, what: str) -> None:
        key, _, rest = what.partition(" ")
        switches: dict[str, Callable[[], None]] = {
            "verbose": lambda: self._set_verbose(True),
            "quiet": lambda: self._set_verbose(False),
            "history": lambda: self._editor.keep_history(True),
            "nohistory": lambda: self._editor.keep_history(False),
        }
        if key in switches and not rest:
            switches[key]()
        elif key == "system":
            self._question.system = rest.strip().strip('"')
        elif key == "parameter" and len(rest.split(None, 1)) == 2:
            name, value = rest.split(None, 1)
            set_option(self._question.options, name, value)
        else:
            raise InvalidRequest("not a setting", hint="/set parameter NAME VALUE, system TEXT, verbose, quiet, history, nohistory")
        self._console.note("set")

    def _set_verbose(self, verbose: bool) -> None:
        self._verbose = verbose

    def _show(self, what: str) -> None:
        if what == "parameters":
            shown = [f"{name}  {value}" for name, value in self._question.options.items()] or ["the model's own"]
        elif what == "system":
            shown = [self._question.system or "none"]
        elif what in ("info", "license"):
            answer = self._client.post("/api/show", {"model": self._question.model})
            shown = list(describe(answer)) if what == "info" else [str(answer.get("license") or "none given")]
        else:
            raise InvalidRequest("nothing to show by that name", hint="/show info, license, parameters or system")
        for line in shown:
            self._console.line(line)

    def _load(self, model: str) -> None:
        if not model:
            raise InvalidRequest("which model?", hint="/load MODEL; cavectl list shows what is here")
        self._client.post("/api/show", {"model": model})
        self._question.model = model
        self._warm_up()
        self._console.note(f"now with {model}")

    def _clear(self, _: str) -> None:
        self._messages.clear()
        self._failed = ""
        self._console.note("cleared")

    def _retry(self, _: str) -> None:
        if not self._failed:
            raise InvalidRequest("no message failed", hint="send one")
        self._say(self._failed)
