"""Uploading a folder to the Hub."""

from pathlib import Path

from app.errors import UserError


def address(repository: str) -> str:
    """Return the address of a repository, whether or not it exists yet."""
    from huggingface_hub import constants

    return f"{constants.ENDPOINT}/{repository}"


def check(repository: str) -> None:
    """Check that a repository has a valid name and that the Hub may be asked.

    Raises:
        UserError: it is not USER/NAME, or HF_HUB_OFFLINE is set.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"--push {repository}: {error}") from None
    if repository.count("/") != 1:
        raise UserError(f"--push {repository}: give USER/NAME, or ORGANISATION/NAME")
    if constants.HF_HUB_OFFLINE:
        raise UserError("--push: HF_HUB_OFFLINE is set; unset it to reach the Hub, or leave out --push")


def push(folder: Path, repository: str, private: bool, message: str) -> str:
    """Upload all files of a folder, make the repository if there is none, and return its address.

    Raises:
        UserError: the Hub cannot be reached, or refuses.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError
    from huggingface_hub.utils import httpx  # the library that it uses: httpx2 since 2.4, httpx before

    api = HfApi()
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(folder_path=folder, repo_id=repository, commit_message=message)
    except LocalTokenNotFoundError:
        raise UserError(f"--push {repository}: nobody is logged in; `hf auth login`, or set HF_TOKEN") from None
    except HfHubHTTPError as error:
        told = str(error).strip().splitlines()[0]
        raise UserError(
            f"--push {repository}: {told}; `hf auth whoami` says who you are, and the token must write"
        ) from None
    except ValueError as error:  # the Hub does not accept the card
        raise UserError(f"--push {repository}: {error}") from None
    except (httpx.HTTPError, OSError) as error:
        raise UserError(f"--push {repository}: {address(repository)} cannot be reached: {error}") from None
    return address(repository)
