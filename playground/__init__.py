"""The playground: a page on which a model is seen drafting, checking and answering, token by token.

It knows the cluster by its public HTTP API alone. Gradio serves the page, in a process of Ray Serve. Everything on the
page is drawn in the browser by the scripts in `static/`, which read `/v1` on the page's own origin as any client does.
(Tabs, controls and charts are our own too: Gradio's would keep a session on the server for every visitor.)

    page.js      tabs (tabs.js), the server and its keys (server.js, browser.js), settings.js, shelf.js
    chat.js      a question -> turn.js -> run.js (reads stream.js, counts, records) -> answer.js (draws, once a frame)
    race.js      the same question without drafts and with them, in turns -> lane.js -> run.js
    hood.js      one recording: scrubber.js and figure.js step by step, charts.js, curve.js
    cluster.js   /metrics, once a second while it is looked at; burst.js sends many prompts in one request
    waking.js    why the first token of an answer is late, where the model slept
    inspector.js, meters.js, numbers.js, dom.js    the hint at a token, the figures, how numbers are written, helpers
                                                   that make elements
    theme.js     light or dark, a script of its own in the page's head: before anything is drawn
    trace.js, stats.js, recording.js, prometheus.js    pure: tokens and numbers of a step, of an answer, of a file,
                                                       of a metrics page
    thoughts.js                                        pure: what an answer is in the conversation that goes on from it

Every answer is kept as a recording (recording.js): what came, and when. A replay plays one and says that it does; an
export writes it to a file; a file that is opened is read field by field, since it may come from anyone.

Model text never passes through Python, a template or `innerHTML`: the only markup is `static/page.html` and the parts
named in it, which are constants. No visitor has a session on the server: a closed tab is a closed socket, and a reload
loses nothing there.

    files.py   the static files, read once at start-up, served under a name that changes with their content; the page
               loads all modules as one script, in one scope: their top-level names must differ
    gradio_files.py   which of Gradio's own files a page needs as it starts, so that the browser asks for all at once
    shell.py   the ASGI layer around Gradio: the page's own head, strict headers, the missing last slash
    page.py    the Gradio page, the ASGI application around it, and `mount` for any FastAPI application
    app.py     the Ray Serve application: one replica, since Gradio keeps its queue in memory
"""
