"""Deployments as a client sees them."""

import json
import urllib.request
from typing import Any


class Server:
    """A deployment as a client sees it."""

    def __init__(self, variables: dict[str, Any], deployment: dict[str, Any]) -> None:
        """Name it."""
        self.name: str = deployment["name"]
        self.unit = f"sglang@{self.name}.service"
        self.model: str = deployment.get("served_model_name") or self.name
        self.url = f"http://{variables.get('ansible_host', variables['inventory_hostname'])}:{deployment['port']}"
        self.headers = {"Content-Type": "application/json"}
        if deployment.get("api_key"):
            self.headers["Authorization"] = f"Bearer {deployment['api_key']}"

    def ask(self, path: str, body: dict[str, Any] | None = None) -> str:
        """Send a request and return the answer."""
        data = json.dumps(body).encode() if body else None
        request = urllib.request.Request(self.url + path, data, self.headers)  # noqa: S310
        with urllib.request.urlopen(request, timeout=300) as answer:  # noqa: S310
            return str(answer.read().decode())


def servers_of(variables: dict[str, Any]) -> list[Server]:
    """Return the deployments of a host."""
    return [Server(variables, deployment) for deployment in variables.get("sglang_deployments") or []]
