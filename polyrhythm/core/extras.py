"""Optional dependencies: whether compiled loops and encryption can be used on this machine."""

from __future__ import annotations


def missing(checksums: bool = True) -> str:
    """Which of numba and the checksum library cannot be imported, and why; empty if both can."""
    name = "numba"
    try:
        import numba  # noqa: F401

        if checksums:
            name = "google_crc32c"
            import google_crc32c  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name == name:
            return _absent(name, "codecs")
        return _broken(name, error)
    except Exception as error:  # numba refuses a NumPy that is too new, or a library is missing
        return _broken(name, error)
    return ""


def no_encryption() -> str:
    """Why the library for encryption cannot be imported; empty if it can."""
    try:
        from cryptography.hazmat.primitives.asymmetric import x25519  # noqa: F401
        from cryptography.hazmat.primitives.ciphers import aead  # noqa: F401
    except ModuleNotFoundError:
        return _absent("cryptography", "hosts")
    except Exception as error:
        return _broken("cryptography", error)
    return ""


def _absent(name: str, extra: str) -> str:
    return f"{name}, which is not installed: pip install 'polyrhythm[{extra}]'"


def _broken(name: str, error: Exception) -> str:
    return f"{name}, which is installed but cannot be imported ({type(error).__name__}: {error})"
