"""Learn digits with a parameter server: `parameter_server.py` serves, `parameter_server.py ADDRESS` is a client."""

import argparse
import signal
import threading
from datetime import timedelta

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from keepstep import ProcessGroupGloo
from keepstep.parameter_server import ParameterServer

UPDATES = 200  # of each client
SERVER, CLIENT, TAG = 0, 1, 0

pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
pixels, test = pixels[:1500].float(), (pixels[1500:].float(), labels[1500:])
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class DigitsServer(ParameterServer):
    """Sends the parameters to each client, and applies the gradients that come back, in the order of their arrival."""

    def __init__(self, port: int) -> None:
        self.lock = threading.Lock()  # sessions run at the same time
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        super().__init__(port)  # last: sessions begin now

    @classmethod
    def new_process_group(cls) -> ProcessGroupGloo:
        return ProcessGroupGloo(timeout=timedelta(seconds=30))

    def forward(self, session_id: str, pg: ProcessGroupGloo) -> None:
        print(f"session {session_id[:8]} begins", flush=True)
        for _ in range(UPDATES):
            with self.lock:
                parameters = parameters_to_vector(model.parameters()).detach()
            pg.send([parameters], CLIENT, TAG).wait()
            gradients = torch.empty_like(parameters)
            pg.recv([gradients], CLIENT, TAG).wait()
            with self.lock:
                for parameter, gradient in zip(model.parameters(), split(gradients), strict=True):
                    parameter.grad = gradient
                self.optimizer.step()
        with self.lock:
            accuracy = (model(test[0]).argmax(1) == test[1]).float().mean()
        print(f"session {session_id[:8]} ends, accuracy {accuracy:.3f}", flush=True)


def split(vector: torch.Tensor) -> list[torch.Tensor]:
    """Return the parts of a vector of all parameters, in the shapes of the parameters."""
    parts = vector.split([parameter.numel() for parameter in model.parameters()])
    return [part.view_as(parameter) for part, parameter in zip(parts, model.parameters(), strict=True)]


cli = argparse.ArgumentParser()
cli.add_argument("address", nargs="?", help="of the server; without it, serve")
address = cli.parse_args().address
if address is None:
    server = DigitsServer(port=0)
    print(server.address(), flush=True)
    signal.pause()  # until Ctrl-C
else:
    pg = DigitsServer.new_session(address)
    parameters = parameters_to_vector(model.parameters()).detach()
    for _ in range(UPDATES):
        pg.recv([parameters], SERVER, TAG).wait()
        vector_to_parameters(parameters, model.parameters())
        batch = torch.randint(len(pixels), (64,))
        loss = nn.functional.cross_entropy(model(pixels[batch]), labels[batch])
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        pg.send([torch.cat([gradient.flatten() for gradient in gradients])], SERVER, TAG).wait()
    print(f"loss {loss.item():.3f}")
    pg.shutdown()
