"""The playground: a page on which a model is seen drafting, checking and answering, token by token.

It knows the cluster by its public HTTP API alone. Gradio gives the frame and Ray Serve the process; the answer is
drawn in the browser, by the scripts in `static/`, which read `/v1` on the page's own origin as any client does:

    chat.js -> stream.js (POST /v1/chat/completions, SSE) -> turn.js -> answer.js (textContent, once a frame)
                                                                     -> meters.js (numbers, ribbon)
    trace.js holds the arithmetic, pure: which token each character belongs to, what the numbers are.

Model text never passes through Python, a template or `innerHTML`: the only markup is `static/chat.html`, a constant.
No session of a visitor lives on the server, so a closed tab is a closed socket and a reload loses nothing there.

    files.py   the static files, read once at start-up, served under a name that changes with their content
    shell.py   the ASGI layer around Gradio: the page's own head, strict headers, the missing last slash
    page.py    the Gradio page, the ASGI application around it, and `mount` for any FastAPI application
    app.py     the Ray Serve application: one replica, since Gradio keeps its queue in memory
"""
