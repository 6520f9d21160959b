"""Readiness of a process, judged by its answers."""

import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

from kv_connector.lab.process import answers


class Slow(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        time.sleep(1.1)  # as SGLang, which checks a second later whether its token has come
        self.send_response(200)
        self.end_headers()


def test_a_server_that_takes_more_than_a_second_to_answer_is_ready() -> None:
    with HTTPServer(("127.0.0.1", 0), Slow) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        try:
            assert answers(f"http://127.0.0.1:{server.server_port}/health")
        finally:
            server.shutdown()
            serving.join()


def test_a_port_that_another_program_has_taken_is_not_ready() -> None:
    """A ZMQ socket sends a greeting first, whose bytes are not HTTP."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def greet() -> None:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"\xff\0\0\0\0\0\0\0\1\x7f\n")

        greeting = threading.Thread(target=greet)
        greeting.start()
        try:
            assert not answers(f"http://127.0.0.1:{server.getsockname()[1]}/health")
        finally:
            greeting.join()
