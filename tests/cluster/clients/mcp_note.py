"""An MCP server whose one tool reads a file: python mcp_note.py FILE. An agent starts it, and talks to it by lines."""

import json
import sys
from pathlib import Path
from typing import Any

TOOL = {"name": "read_note", "description": "Reads the note.", "inputSchema": {"type": "object", "properties": {}}}


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    match asked["method"]:
        case "initialize":
            info = {"name": "notes", "version": "1"}
            told = asked["params"]["protocolVersion"]
            return {"protocolVersion": told, "capabilities": {"tools": {}}, "serverInfo": info}
        case "tools/list":
            return {"tools": [TOOL]}
        case "tools/call":
            return {"content": [{"type": "text", "text": Path(sys.argv[1]).read_text()}]}
    return {}


for line in sys.stdin:
    asked = json.loads(line)
    if "id" in asked:  # what has none is told, not asked
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": answer(asked)}), flush=True)
