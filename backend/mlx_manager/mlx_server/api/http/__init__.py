"""HTTP around the routes: sockets, WebSockets, codings of bodies, paths, the log of answers."""
