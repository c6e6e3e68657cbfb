"""The event loop: HTTP requests in, answers out. README.md in this folder says what is where."""

from penstock.transport.engine import engine as engine
from penstock.transport.http import CANCELLED as CANCELLED
from penstock.transport.http import CLOSED as CLOSED
from penstock.transport.http import DEFECT as DEFECT
from penstock.transport.http import DESCRIPTORS_HINT as DESCRIPTORS_HINT
from penstock.transport.http import LATE_BODY as LATE_BODY
from penstock.transport.http import LATE_FIRST_BYTE as LATE_FIRST_BYTE
from penstock.transport.http import LATE_TOTAL as LATE_TOTAL
from penstock.transport.http import OVERLONG as OVERLONG
from penstock.transport.http import HttpAnswer as HttpAnswer
from penstock.transport.http import HttpRequest as HttpRequest
from penstock.transport.http import HttpSink as HttpSink
from penstock.transport.http import HttpTransfer as HttpTransfer
from penstock.transport.signing import EMPTY_SHA256 as EMPTY_SHA256
from penstock.transport.signing import EXPIRES_S_MAX as EXPIRES_S_MAX
from penstock.transport.signing import UNSIGNED_PAYLOAD as UNSIGNED_PAYLOAD
from penstock.transport.signing import Signing as Signing
from penstock.transport.signing import signing_key as signing_key
