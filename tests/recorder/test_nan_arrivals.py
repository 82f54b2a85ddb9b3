"""``--nan``: what a NaN or infinity becomes decides, not the call that made it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import cudalens
from cudalens.core.report import Report
from tests import nan_programs

pytestmark = pytest.mark.usefixtures("sim")

INF, NAN = float("inf"), float("nan")


def checked(code: str, *, nan: Any = True, **variables: Any) -> Report | None:
    """Run the lines of a program under the check; return the report, if it is stopped."""
    return nan_programs.checked(code, nan=nan, INF=INF, NAN=NAN, **variables)[0]


def older(**options: Any) -> dict[str, Any]:
    """Return what a cell before has made."""
    net = nn.Linear(2, 1).to("cuda")
    return {
        "w": torch.ones(2, device="cuda"),
        "o": torch.zeros(2, device="cuda"),
        "net": net,
        "opt": torch.optim.SGD(net.parameters(), lr=1e30, **options),
    }


def places(report: Report | None) -> tuple[int, int]:
    """Return the lines of the maker and of the sink."""
    assert report is not None
    assert report.kind == "nonfinite"
    found = {item.kind: item.sources for item in report.observations}
    return found["maker"][0].line, found["sink"][0].line


RIGHT = {
    "a logarithm that where() discards": """
        gap = torch.tensor([0., 3., 5.], device="cuda")
        near = torch.where(gap > 0, torch.log(gap), torch.zeros_like(gap))
        assert near.sum().item() > 0
    """,
    "a quotient that where() discards": """
        num = torch.tensor([1., 0.], device="cuda")
        assert torch.where(num != 0, num / num, 0).sum().item() == 1
    """,
    "a mean without the NaN": """
        hit, union = torch.tensor([1., 0.], device="cuda"), torch.tensor([2., 0.], device="cuda")
        assert torch.nanmean(hit / union).item() == 0.5
    """,
    "nan_to_num": """
        x = torch.zeros(2, device="cuda")
        assert (x / x).nan_to_num(1.0).sum().item() == 2
    """,
    "masked scores": """
        scores = torch.zeros(4, 4, device="cuda", requires_grad=True)
        keep = torch.ones(4, 4, device="cuda").tril().bool()
        scores.masked_fill(~keep, -INF).softmax(-1).sum().backward()
    """,
    "a mask that is the logarithm of 0": """
        keep = torch.tensor([1., 0.], device="cuda")
        scores = torch.zeros(2, device="cuda", requires_grad=True)
        (scores + keep.log()).softmax(-1).square().sum().backward()
    """,
    "an infinity that the host reads": """
        best = torch.tensor([1., 2.], device="cuda") / 0
        assert best.min().item() == INF
    """,
    "RAdam, which divides by 0": """
        net = nn.Linear(3, 2).to("cuda")
        opt = torch.optim.RAdam(net.parameters(), lr=1e-3, foreach=True)
        for _ in range(8):
            opt.zero_grad()
            net(torch.ones(2, 3, device="cuda")).pow(2).sum().backward()
            opt.step()
    """,
    "a scaler that looks for its scale": """
        net = nn.Linear(2, 1).to("cuda")
        scaler, opt = torch.amp.GradScaler("cuda"), torch.optim.SGD(net.parameters(), lr=0.01)
        for _ in range(8):
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = (net(torch.ones(1, 2, device="cuda") * 10) - 30).float().pow(2).sum()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        assert scaler.get_scale() < 65536
    """,
    "a NaN that is asked for and read": """
        gaps = torch.full((2,), NAN, device="cuda")
        gaps.tolist(), gaps.sum().item()
    """,
    "a gradient that a hook cleans": """
        x = torch.zeros(2, device="cuda", requires_grad=True)
        x.register_hook(lambda grad: grad.nan_to_num(0.0, 0.0, 0.0))
        x.sqrt().sum().backward()
        assert x.grad.sum().item() == 0
    """,
    "a skipped batch": """
        x = torch.zeros(2, device="cuda", requires_grad=True)
        loss = (x / x).sum()
        if torch.isfinite(loss):
            loss.backward()
    """,
    "a buffer that is overwritten": """
        x = torch.zeros(2, device="cuda")
        x.log_()
        x.fill_(1.0)
        assert (x * 2).sum().item() == 4
    """,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_value_that_never_arrives_is_not_told(name: str) -> None:
    assert checked(RIGHT[name]) is None


WRONG = {
    "forward": (
        """
        x = torch.tensor([1., 0.], device="cuda", requires_grad=True)
        y = x.log()
        z = y * 2
        loss = z.sum()
        loss.backward()
        """,
        "torch.Tensor.log made -inf at [1] from x = 0.0",
        (2, 5),
    ),
    "backward": (
        """
        x = torch.zeros(3, device="cuda", requires_grad=True)
        y = torch.where(x > 0, x.sqrt(), x)
        loss = y.sum()
        loss.backward()
        """,
        "the backward node SqrtBackward0 made nan at [0] from gradient = 0.0, result = 0.0",
        (2, 4),
    ),
    "data": (
        """
        data = torch.ones(8, 4)
        data[5, 2] = NAN
        items = torch.utils.data.TensorDataset(data, torch.zeros(8, 1))
        net = nn.Linear(4, 1).to("cuda")
        for x, y in torch.utils.data.DataLoader(items, batch_size=4):
            loss = F.mse_loss(net(x.cuda()), y.cuda())
            loss.backward()
        """,
        "x[1, 2] = nan already where torch.Tensor.cuda reads it",
        (6, 7),
    ),
    "0 / 0": (
        """
        num, den = torch.zeros(2, device="cuda"), torch.zeros(2, device="cuda")
        ratio = num / den
        mean = ratio.mean()
        print(float(mean))
        """,
        "torch.Tensor.div made nan at [0] from num = 0.0, den = 0.0",
        (2, 4),
    ),
    "overflow in float16": (
        """
        x = torch.full((2,), 6e4, device="cuda").half()
        y = x * 2
        loss = (y - y).sum()
        print(f"{loss:.3f}")
        """,
        "torch.Tensor.mul made inf at [0] from x = 60000.0, other = 2",
        (2, 4),
    ),
    "a row that is masked": (
        """
        scores = torch.zeros(2, 3, device="cuda", requires_grad=True)
        mask = torch.tensor([[True, True, True], [False, False, True]], device="cuda")
        scores = scores.masked_fill(mask, -INF)
        attention = scores.softmax(-1)
        attention.sum().backward()
        """,
        "torch.Tensor.softmax made nan at [0, 0]",
        (4, 5),
    ),
    "a step that is too large": (
        """
        net = nn.Linear(2, 1).to("cuda")
        opt = torch.optim.SGD(net.parameters(), lr=1e30)
        for _ in range(4):
            opt.zero_grad()
            net(torch.full((1, 2), 1e20, device="cuda")).mean().backward()
            opt.step()
        """,
        "torch.optim.SGD.step made net.weight[0, 0] = -inf: its gradient is 1e+20 there, "
        "lr = 1e+30",
        (6, 6),
    ),
    "the loss of no element": (
        """
        err = torch.ones(4, device="cuda", requires_grad=True)
        keep = torch.zeros(4, dtype=torch.bool, device="cuda")
        loss = err[keep].mean()
        loss.backward()
        """,
        "torch.Tensor.mean made nan at its result",
        (3, 4),
    ),
    "the logarithm of a negative number": (
        """
        p = torch.tensor([0.5, -0.2], device="cuda", requires_grad=True)
        loss = -p.log().mean()
        loss.backward()
        """,
        "torch.Tensor.log made nan at [1] from p = -0.2",
        (2, 3),
    ),
    "a step without an optimizer": (
        """
        v = torch.ones(2, device="cuda", requires_grad=True)
        (v * 1e30).sum().backward()
        with torch.no_grad():
            v -= 1e30 * v.grad
        """,
        "torch.Tensor.mul made inf at [0] from v.grad = 1e+30, other = 1e+30",
        (4, 4),
    ),
    "a moment that overflows": (
        """
        p = nn.Parameter(torch.zeros(4, device="cuda"))
        p.grad = torch.full((4,), 1e21, device="cuda")
        torch.optim.Adam([p]).step()
        """,
        "torch.optim.Adam.step made exp_avg_sq of p[0] = inf: its gradient is 1e+21 there, "
        "lr = 0.001",
        (3, 3),
    ),
    "a scaler that skips each step": (
        """
        w = nn.Parameter(torch.zeros(2, device="cuda"))
        scaler, opt = torch.amp.GradScaler("cuda"), torch.optim.SGD([w], lr=0.1)
        for _ in range(30):
            opt.zero_grad()
            loss = torch.where(w > 0, w.sqrt(), 1).sum()
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        """,
        "the backward node SqrtBackward0 made nan at [0] from gradient = 0.0, result = 0.0",
        (5, 8),
    ),
    "a gradient after a scaler has done its step": (
        """
        w = nn.Parameter(torch.zeros(2, device="cuda"))
        scaler, opt = torch.amp.GradScaler("cuda"), torch.optim.SGD([w], lr=0.0)
        scaler.scale((w * 2).sum()).backward()
        scaler.step(opt)
        scaler.update()
        loss = torch.where(w > 0, w.sqrt(), 1).sum()
        loss.backward()
        """,
        "the backward node SqrtBackward0 made nan at [0] from gradient = 0.0, result = 0.0",
        (6, 7),
    ),
    "a loss that was bad before it was scaled": (
        """
        w = nn.Parameter(torch.zeros(2, device="cuda"))
        scaler = torch.amp.GradScaler("cuda")
        loss = (w / w).sum()
        scaler.scale(loss).backward()
        """,
        "torch.Tensor.div made nan at [0] from w = 0.0",
        (3, 4),
    ),
    "a running mean of a batch with NaN": (
        """
        x = torch.zeros(4, 3, device="cuda")
        x = x / x
        bn = nn.BatchNorm1d(3).to("cuda")
        bn(x)
        loss = bn.eval()(torch.ones(4, 3, device="cuda")).sum()
        loss.backward()
        """,
        "torch.Tensor.div made nan at [0, 0] from x = 0.0",
        (2, 6),
    ),
    "a NaN of forward that backward multiplies by 0": (
        """
        x = torch.tensor([-1., 4.], device="cuda")
        w = torch.ones(2, device="cuda", requires_grad=True)
        y = x.sqrt() * w
        y[1:].sum().backward()
        """,
        "torch.Tensor.sqrt made nan at [0] from x = -1.0",
        (3, 4),
    ),
    "an infinity of forward that a product multiplies by 0": (
        """
        x = torch.ones(2, 2, device="cuda") / torch.tensor([[0., 1.]], device="cuda").T
        w = torch.ones(2, 2, device="cuda", requires_grad=True)
        y = x @ w
        y[1:].sum().backward()
        """,
        'torch.Tensor.div made inf at [0, 0] from torch.ones(2, 2, device="cuda") = 1.0, '
        'torch.tensor([[0., 1.]], device="cuda").T = 0.0',
        (1, 4),
    ),
    "a row without a key before a product": (
        """
        mask = torch.tensor([[1, 0], [0, 0]], device="cuda")
        a = torch.zeros(2, 2, device="cuda").masked_fill(mask == 0, -INF).softmax(-1)
        w = torch.ones(2, 2, device="cuda", requires_grad=True)
        out = a @ w
        out[:1].sum().backward()
        """,
        "torch.Tensor.softmax made nan at [1, 0]",
        (2, 5),
    ),
    "a gradient of another shape than the result": (
        """
        x = torch.zeros(4, device="cuda", requires_grad=True)
        y = x / x.sum()
        torch.nan_to_num(y).sum().backward()
        """,
        "the backward node DivBackward0 made nan at [0] from gradient = 0.0, self = 0.0, "
        "other = 0.0",
        (2, 3),
    ),
    "an older value beside it that where() discards": (
        """
        gap = torch.tensor([0., 1.], device="cuda")
        near = torch.where(gap > 0, gap.log(), gap)
        loss = near.sum() + (gap - gap).mean() / (gap - gap).mean()
        loss.requires_grad_().backward()
        """,
        "torch.Tensor.div made nan at its result from (gap - gap).mean() = 0.0",
        (3, 4),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_maker_and_the_sink_are_named(name: str) -> None:
    code, headline, lines = WRONG[name]
    report = checked(code)
    assert report is not None
    assert report.headline == headline
    assert places(report) == lines


OLDER = {
    "out=": ("torch.log(torch.zeros(2, device='cuda'), out=o)\n(o - o).sum().item()", (1, 2)),
    "a view": ("o[:1] /= torch.zeros(1, device='cuda')\no.sum().item()", (1, 2)),
    "in place": ("w.div_(0.0)\nw.sub_(w)\nw.sum().item()", (1, 3)),
    "through .data": ("w.data.div_(0.0)\n(w - w).sum().item()", (1, 2)),
    "a step": ("net(torch.full((1, 2), 1e20).cuda()).sum().backward()\nopt.step()", (2, 2)),
}


@pytest.mark.parametrize("name", OLDER)
def test_the_first_write_to_an_older_tensor_is_seen(name: str) -> None:
    code, lines = OLDER[name]
    assert places(checked(code, **older())) == lines


def test_a_parameter_that_was_bad_before_is_no_step_s_making() -> None:
    bad = older()
    with torch.no_grad():
        bad["net"].bias.fill_(NAN)
    report = checked("net(torch.ones(1, 2).cuda()).sum().backward()\nopt.step()", **bad)
    assert report is not None
    assert report.headline.startswith("net.bias[0] = nan already where torch.nn.")


def test_a_nan_that_forward_has_saved_in_an_earlier_cell() -> None:
    """No call of this one has made it, and neither has the node."""
    w = torch.ones(2, requires_grad=True)
    report = checked("y[1:].sum().backward()", y=torch.tensor([NAN, 2.0]) * w)
    assert report is not None
    assert (
        report.headline
        == "the backward node MulBackward0 computes with a nan that forward has saved"
    )
    assert [
        item.text.partition(" in ")[0] for item in report.observations if item.kind == "maker"
    ] == ["NaN comes"]
    infinity = checked("y[1:].sum().backward()", y=torch.tensor([INF, 2.0]) * w)
    assert infinity is not None
    assert infinity.headline.startswith("the backward node MulBackward0 made nan at [0]")
    assert "what it saved in forward contained infinities, but no NaN" in infinity.explanation


def test_a_step_does_not_make_the_nan_of_its_gradient() -> None:
    code = """
    net = nn.Linear(2, 1).to("cuda")
    h = net(torch.ones(3, 2, device="cuda"))
    net.weight.register_hook(lambda grad: grad * NAN)  # behind all nodes
    h.sum().backward()
    torch.optim.SGD(net.parameters(), lr=0.1).step()
    """
    report = checked(code)
    assert report is not None
    maker = next(it.text for it in report.observations if it.kind == "maker")
    assert maker.startswith("NaN comes in here")


def test_the_values_that_a_node_was_given_stay_in_the_report_of_a_gradient() -> None:
    """Only of a step, which has just run, the parameter has its name in the headline."""
    report = checked("""
    w = torch.zeros(2, requires_grad=True)
    y = w.sqrt()
    y.sum().backward()
    """)
    assert report is not None
    assert "the gradient of w" in report.explanation
    assert ("y", 0.0) in [(it.expression, it.summary.min) for it in report.tensors]
    report = checked(OLDER["a step"][0], **older())
    assert report is not None
    assert report.headline.startswith("torch.optim.SGD.step made net.weight[0, 0] = -inf")


def test_a_condition_that_a_checkpoint_gives_once_is_left_out() -> None:
    code = """
    from torch.utils.checkpoint import checkpoint
    x = torch.tensor([0., 1.], device="cuda", requires_grad=True)
    f = lambda t: torch.where(t > 0, t.sqrt(), 0.)
    checkpoint(f, x, use_reentrant=False).sum().backward()
    """
    report = checked(code)
    assert report is not None
    assert report.limits == ()


@pytest.mark.parametrize(("logits", "has_fix"), [("[[1000., 0.]]", False), ("[[88., -88.]]", True)])
def test_no_edit_is_shown_where_the_values_were_bad_before(logits: str, has_fix: bool) -> None:
    code = f"""
    logits = torch.tensor({logits}, requires_grad=True)
    p = torch.exp(logits) / torch.exp(logits).sum(1, keepdim=True)
    loss = -torch.log(p[:, 1]).mean()
    loss.backward()
    """
    report = checked(code)
    assert report is not None
    assert any(hint.fix for hint in report.hints) is has_fix


def test_strict_stops_at_the_maker() -> None:
    code, _, _ = WRONG["forward"]
    report = checked(code, nan="strict")
    assert report is not None
    assert (report.source.line, report.observations) == (2, ())
    assert checked(RIGHT["a logarithm that where() discards"], nan="strict") is not None


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match="nan='loose'"):
        cudalens.check(nan="loose")  # type: ignore[arg-type]


def test_a_tensor_is_not_kept_alive() -> None:
    with cudalens.check(nan=True):
        x = torch.zeros(3, device="cuda")
        bad = x.log()
        seen = [weakref.ref(x), weakref.ref(bad)]
        del x, bad
        assert [item() for item in seen] == [None, None]


@pytest.mark.parametrize("kind", ["SGD", "Adam", "RAdam"])
def test_training_gives_the_same_bits(kind: str) -> None:
    def weights(nan: Any) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 1)).to("cuda")
        opt = getattr(torch.optim, kind)(net.parameters(), lr=0.01)
        data = torch.randn(16, 4).cuda()
        with cudalens.check(nan=nan):
            for _ in range(5):
                opt.zero_grad()
                F.dropout(net(data), 0.1).square().mean().backward()
                opt.step()
        return [item.detach().cpu() for item in net.parameters()]

    plain, watched = weights(False), weights(True)
    assert all(map(torch.equal, plain, watched))


def test_a_guard_that_meets_a_nan_names_its_maker() -> None:
    code = """
        logits = torch.zeros(2, 3, device="cuda")
        chances = (logits / 0.0).softmax(-1)
        torch.multinomial(chances, 1)
    """
    report = checked(code)
    assert report is not None
    assert report.headline.startswith("torch.Tensor.div made nan at [0, 0]")
    assert places(report) == (2, 3)


@pytest.mark.filterwarnings("ignore:.*SqrtBackward0")
@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((-1.0, 4.0), "the result of sqrt is NaN in forward already"),
        ((0.0, 4.0), "the slope of a root is infinite at 0"),
    ],
)
def test_anomaly_mode_is_explained_by_what_the_node_saved(
    values: tuple[float, ...], says: str
) -> None:
    x = torch.tensor(values, requires_grad=True)
    with pytest.raises(RuntimeError, match="SqrtBackward0"), cudalens.check() as session:
        with torch.autograd.set_detect_anomaly(True, check_nan=True):
            (x.sqrt() * torch.zeros(2)).sum().backward()
    assert session.report is not None
    (hint,) = session.report.hints
    assert hint.text.startswith(says)


NORMS = {
    "batch_norm": "F.batch_norm(x, mean, var, w, b, True)",
    "instance_norm": "F.instance_norm(x, mean, var)",
    "batch_norm of torch": "torch.batch_norm(x, w, b, mean, var, True, 0.1, 1e-5, False)",
    "instance_norm of torch": "torch.instance_norm(x, w, b, mean, var, True, 0.1, 1e-5, False)",
    "native": "torch.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5)",
    "an op": "torch.ops.aten.native_batch_norm(x, w, b, mean, var, True, 0.1, 1e-5)",
    "statistics alone": "torch.batch_norm_update_stats(x, mean, var, 0.1)",
}


@pytest.mark.parametrize("call", NORMS.values(), ids=NORMS)
def test_a_nan_in_running_statistics_is_followed_to_its_maker(call: str) -> None:
    code = f"""
        x = torch.zeros(4, 3, 2)
        x = x / x
        {call}
        loss = F.batch_norm(torch.ones(4, 3), mean, var).sum()
        loss.backward()
    """
    given = {"mean": torch.zeros(3), "var": torch.ones(3), "b": torch.zeros(3)}
    report = checked(code, **given, w=torch.ones(3))
    assert report is not None
    assert report.headline == "torch.Tensor.div made nan at [0, 0, 0] from x = 0.0"
    assert places(report) == (2, 5)
