"""Access keys, Signature Version 4, and the bodies of signed requests. Nothing here knows sockets or HTTP servers."""

from penstock.gateway.authentication.claims import SIGNING_PARAMETERS
from penstock.gateway.authentication.keys import KEYS_VARIABLE, AccessKey, AccessKeys, presign
from penstock.gateway.authentication.verifying import OpenAuthenticator, SignatureAuthenticator

__all__ = [
    "KEYS_VARIABLE",
    "SIGNING_PARAMETERS",
    "AccessKey",
    "AccessKeys",
    "OpenAuthenticator",
    "SignatureAuthenticator",
    "presign",
]
