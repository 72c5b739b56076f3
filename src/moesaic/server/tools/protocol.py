"""The fields of a chat request that are about tools."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, StrictBool, StrictStr, StringConstraints

FunctionName = Annotated[StrictStr, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(BaseModel):
    """What a model can call. Further fields go to the template as they are."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    """A JSON schema of the arguments (Any: JSON values); without it there are none."""
    strict: StrictBool | None = None


class Tool(BaseModel):
    """One tool; only functions are known here."""

    model_config = ConfigDict(extra="allow")

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """Return the tool as chat templates take it (Any: JSON values)."""
        return self.model_dump(exclude_unset=True)


class FunctionChoice(BaseModel):
    """The name of one function."""

    name: StrictStr


class ToolChoice(BaseModel):
    """The one function that is to be called."""

    type: Literal["function"]
    function: FunctionChoice
