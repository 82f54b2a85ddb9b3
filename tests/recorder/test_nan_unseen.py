"""``--nan`` on programs that it was not written with: right ones, and ones with a real NaN."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cudalens
from tests.recorder.test_nan_arrivals import checked, places

pytestmark = [
    pytest.mark.usefixtures("sim"),
    pytest.mark.filterwarnings("ignore:std.*degrees of freedom"),
]

RIGHT = {
    "logsumexp of -inf rows": """
        a = torch.full((2, 3), -INF, device="cuda"); a[0] = 0
        z = torch.logsumexp(a, 1)
        w = torch.where(z.isfinite(), (a - z[:, None]).exp().sum(1), 0)
        w.tolist()
    """,
    "nan as missing data, imputed": """
        data = torch.tensor([[1., NAN], [3., 4.]], device="cuda")
        mean = data.nanmean(0)
        data = torch.where(data.isnan(), mean, data)
        data.sum().item()
    """,
    "nansum in loss": """
        x = torch.tensor([1., 0.], device=D); w = torch.ones(2, device=D, requires_grad=True)
        loss = (x / x * 1.0).nansum() * w.sum()
        loss.backward()
    """,
    "running min begins at inf": """
        best = torch.tensor(INF, device="cuda")
        for v in (3., 2., 5.):
            best = torch.minimum(best, torch.tensor(v, device="cuda"))
        best.item()
    """,
    "topk filter -inf": """
        logits = torch.randn(2, 10, device="cuda")
        kth = logits.topk(3).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -INF)
        p = logits.softmax(-1)
        torch.multinomial(p, 1).shape, p.log().max().item()
    """,
    "iou with maximum": """
        inter = torch.zeros(3, device="cuda"); union = torch.zeros(3, device="cuda")
        iou = inter / union
        iou[union == 0] = 0
        iou.mean().item()
    """,
    "isnan early stop": """
        x = torch.zeros(2, device="cuda", requires_grad=True)
        for step in range(3):
            loss = (x / x).mean()
            if torch.isnan(loss): continue
            loss.backward()
    """,
    "double where": """
        x = torch.tensor([0., 4.], device="cuda", requires_grad=True)
        safe = torch.where(x > 0, x, 1.)
        y = torch.where(x > 0, safe.log(), 0.).sum()
        y.backward()
        x.grad.tolist()
    """,
    "causal float mask sdpa": """
        q = torch.randn(1, 2, 4, 8, device="cuda", requires_grad=True)
        m = torch.full((4, 4), -INF, device="cuda").triu(1)
        o = F.scaled_dot_product_attention(q, q, q, attn_mask=m)
        o.square().mean().backward()
        q.grad.isfinite().all().item()
    """,
    "log of one-hot in gumbel / kl with zeros": """
        t = torch.tensor([[0., 1.]], device=D); x = torch.zeros(1, 2, device=D, requires_grad=True)
        loss = F.kl_div(x.log_softmax(-1), t, reduction="batchmean"); loss.backward()
        loss.item()
    """,
    "grad thrown away": """
        x = torch.zeros(2, device="cuda", requires_grad=True)
        (g,) = torch.autograd.grad(x.sqrt().sum(), x)
        x2 = torch.where(g.isfinite(), g, 0)
        x2.sum().item()
    """,
    "zero_grad clears": """
        w = nn.Parameter(torch.zeros(2, device="cuda"))
        opt = torch.optim.SGD([w], .1)
        w.grad = torch.zeros(2, device="cuda") / 0
        opt.zero_grad()
        w.sum().backward(); opt.step()
    """,
    "MultiheadAttention padding": """
        mha = nn.MultiheadAttention(8, 2, batch_first=True).to("cuda")
        x, pad = torch.randn(2, 3, 8, device=D), torch.tensor([[0, 0, 1], [0, 1, 1]]).bool().to(D)
        mha(x, x, x, key_padding_mask=pad)[0].sum().backward()
    """,
    "clip_grad_norm with inf check": """
        net = nn.Linear(2, 1).to("cuda"); opt = torch.optim.SGD(net.parameters(), .1)
        for _ in range(2):
            opt.zero_grad(); net(torch.ones(1, 2, device="cuda")).sum().backward()
            n = nn.utils.clip_grad_norm_(net.parameters(), INF)
            opt.step()
        n.item() > 0
    """,
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_program_is_left_alone(name: str) -> None:
    assert checked(RIGHT[name], D="cuda") is None


WRONG = {
    "inplace": (
        """
        x = torch.ones(3, device="cuda")
        x.sub_(1)
        x.reciprocal_()
        x.mul_(0)
        print(x.sum().item())
        """,
        "torch.Tensor.reciprocal_ made inf at [0]",
        (3, 5),
    ),
    "foreach": (
        """
        ps = [torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")]
        ds = [torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")]
        qs = torch._foreach_div(ps, ds)
        total = qs[0].sum() + qs[1].sum()
        print(total.item())
        """,
        "torch._foreach_div made nan at [0] of item 1 from ps[1] = 0.0, ds[1] = 0.0",
        (3, 5),
    ),
    "foreach_": (
        """
        ps = [torch.ones(2, device="cuda"), torch.zeros(2, device="cuda")]
        torch._foreach_log_(ps)
        torch._foreach_mul_(ps, 0.0)
        print(ps[1].sum().item())
        """,
        "torch._foreach_log_ made -inf at [0] of item 1",
        (2, 4),
    ),
    "out": (
        """
        buf = torch.empty(2, device="cuda")
        a = torch.zeros(2, device="cuda")
        torch.div(a, a, out=buf)
        print(buf.max().item())
        """,
        "torch.div made nan at [0] from a = 0.0",
        (3, 4),
    ),
    "bn of one": (
        """
        x = torch.ones(4, 3, device="cuda", requires_grad=True)
        y = (x - x.mean(0)) / x.std(0)
        loss = y.sum()
        loss.backward()
        """,
        "torch.Tensor.div made nan at [0, 0] from x - x.mean(0) = 0.0, x.std(0) = 0.0",
        (2, 4),
    ),
    "exp overflow": (
        """
        w = torch.tensor([100.], device="cuda", requires_grad=True)
        z = w.exp()
        p = z / z.sum()
        loss = -p.log().sum()
        loss.backward()
        """,
        "torch.Tensor.exp made inf at [0] from w = 100.0",
        (2, 5),
    ),
    "cosine of zero by hand": (
        """
        a = torch.zeros(1, 4, device=D, requires_grad=True); b = torch.ones(1, 4, device=D)
        sim = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
        loss = 1 - sim.mean()
        loss.backward()
        """,
        "torch.Tensor.div made nan at [0] from (a * b).sum(1) = 0.0, a.norm(dim=1) * "
        "b.norm(dim=1) = 0.0",
        (2, 4),
    ),
    "data inf": (
        """
        x = torch.tensor([1., NAN, 2.])
        x = x.to("cuda")
        w = nn.Parameter(torch.ones(3, device="cuda"))
        loss = (x * w).sum()
        loss.backward()
        """,
        "torch.tensor was given nan as a number",
        (1, 5),
    ),
    "custom function": (
        """
        class Inv(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                ctx.save_for_backward(x)
                return x * 1
            @staticmethod
            def backward(ctx, g):
                (x,) = ctx.saved_tensors
                return g / x
        v = torch.zeros(2, device="cuda", requires_grad=True)
        Inv.apply(v).sum().backward()
        """,
        "the backward node InvBackward made inf at [0]",
        (11, 11),
    ),
    "ema param": (
        """
        p = nn.Parameter(torch.ones(2, device="cuda")); ema = torch.ones(2, device="cuda")
        scale = torch.zeros((), device="cuda")
        with torch.no_grad():
            p.copy_(ema / scale - ema / scale)
        """,
        "torch.Tensor.div made inf at [0] from ema = 1.0, scale = 0.0",
        (4, 4),
    ),
    "rnn exploding": (
        """
        h = torch.ones(1, 4, device=D, requires_grad=True); W = torch.full((4, 4), 1e10, device=D)
        for _ in range(6):
            h = h @ W
        loss = h.mean()
        loss.backward()
        """,
        "torch.Tensor.matmul made inf at [0, 0] from h (up to 6.4e+31), W (up to 1e+10)",
        (3, 5),
    ),
    "half attention overflow": (
        """
        q = torch.full((1, 4, 64), 40., device="cuda").half().requires_grad_()
        s = q @ q.transpose(1, 2)
        a = (s - s.amax(-1, keepdim=True)).softmax(-1)
        loss = a.float().sum()
        loss.backward()
        """,
        "torch.Tensor.matmul made inf at [0, 0, 0] from q (up to 40.0), q.transpose(1, "
        "2) (up to 40.0)",
        (2, 5),
    ),
    "lr warm": (
        """
        p = nn.Parameter(torch.ones(2, device="cuda")); opt = torch.optim.SGD([p], lr=float("inf"))
        p.sum().backward()
        opt.step()
        """,
        "torch.optim.SGD.step made p[0] = -inf: its gradient is 1.0 there, lr = inf",
        (3, 3),
    ),
    "checkpoint": (
        """
        from torch.utils.checkpoint import checkpoint
        x = torch.zeros(2, device="cuda", requires_grad=True)
        def f(x): return (x * x).sqrt()
        y = checkpoint(f, x, use_reentrant=False)
        y.sum().backward()
        """,
        "the backward node SqrtBackward0 made inf at [0] from gradient = 1.0",
        (3, 5),
    ),
    "bce by hand": (
        """
        logit, t = torch.tensor([-200., 3.], device=D, requires_grad=True), torch.ones(2, device=D)
        p = torch.sigmoid(logit)
        loss = -(t * p.log() + (1 - t) * (1 - p).log()).mean()
        loss.backward()
        """,
        "torch.Tensor.log made -inf at [0] from p = 0.0",
        (3, 4),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_real_nan_has_its_maker_and_its_sink(name: str) -> None:
    code, headline, lines = WRONG[name]
    report = checked(code, D="cuda")
    assert report is not None
    assert report.headline == headline
    assert places(report) == lines
    assert report.argument is None


DEEP = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4)
    def forward(self, x):
        return x + self.a(x).relu()
net = nn.Sequential(*(Block() for _ in range(5))).to("cuda")
with torch.no_grad():
    net[4].a.weight.copy_(weight)
    chances = torch.softmax(net(torch.ones(2, 4, device="cuda")), -1)
torch.multinomial(chances, 1)
"""


def test_a_weight_that_holds_nan_is_named_where_a_guard_meets_it() -> None:
    weight = torch.zeros(4, 4)
    weight[1, 2] = float("nan")
    report = checked(DEEP.replace("    net[4].a.weight.copy_(weight)\n", ""))
    assert report is None
    setup, _, rest = DEEP.partition("with torch.no_grad():\n    net[4].a.weight.copy_(weight)\n")
    space: dict[str, object] = {"torch": torch, "nn": nn}
    exec(setup, space)
    with torch.no_grad():
        space["net"][4].a.weight.copy_(weight)  # type: ignore[index]
    report = checked(f"with torch.no_grad():\n{rest}", **space)
    assert report is not None
    assert report.headline.startswith("net.4.a.weight[1, 2] = nan already where torch.nn")
    assert report.kind == "nonfinite"


def test_a_parameter_with_nan_is_named_where_no_call_of_it_is_known() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to("cuda")
    with torch.no_grad():
        net[1].bias[1] = float("nan")
        held = [net(torch.ones(1, 2, device="cuda")).softmax(-1)]
    with pytest.raises(cudalens.DeviceValueError) as caught, cudalens.check():
        torch.multinomial(held[0], 1)
    (hint,) = caught.value.report.hints
    assert ". net.1.bias contains NaN (1 of 2 values, the first at [1])" in hint.text


SEVERAL = """
bad = torch.zeros(3, 3, device="cuda")
bad[1] = -INF
zero = torch.zeros(3, 3, device="cuda")
made = torch.ones(3, 3, device="cuda")
made[:, ROW] = zero[0, 0] / zero[0, 0]
"""


@pytest.mark.parametrize(
    ("line", "row"),
    [
        ("torch.cat([bad, made], 1)", 0),
        ("torch.stack([bad, made])", 1),
        ("made.t() @ bad", 2),
        ("F.linear(bad.nan_to_num(), made.t())", 1),
    ],
)
def test_the_input_that_holds_the_nan_is_followed(line: str, row: int) -> None:
    """Where another input is not finite either, and the op is not elementwise."""
    code = SEVERAL.replace("ROW", str(row)) + f"y = {line}\nassert y.sum().item() != 0"
    report = checked(code)
    assert report is not None
    assert report.headline.startswith("torch.Tensor.div made nan at its result from zero[0, 0]")
    assert places(report) == (5, 7)


TWO = """
first = torch.zeros(2, 3, device="cuda")
first[0] = first[0] / first[0]
second = torch.zeros(3, 2, device="cuda")
second[:, 1] = second[:, 1].log() - second[:, 1].log()
"""


@pytest.mark.parametrize(
    ("line", "place"),
    [
        ("first[1:] @ second", 4),
        ("first @ second[:, :1]", 2),
        ("torch.cat([first[1:], second.t()])", 4),
        ("torch.cat([second.t()[:1], first])", 2),
    ],
)
def test_of_two_inputs_with_nan_the_one_that_was_read_is_followed(line: str, place: int) -> None:
    report = checked(f"{TWO}y = {line}\nprint(y.sum().item())")
    assert report is not None
    assert places(report)[0] == place


GIVEN = {
    "an input of a layer, of which backward takes another row": """
        x = torch.tensor([[1., NAN], [3., 4.]], device=D)
        w = torch.nn.Linear(2, 1).to(D)
        out = w(x)[1:].sum()
        out.backward()
    """,
    "an operand": """
        y = torch.tensor([0., 1.], device=D) / 0
        w = torch.ones(2, device=D, requires_grad=True)
        z = torch.nan_to_num(w * y)
        z.sum().backward()
    """,
    "a view of what a loss ignores": """
        x = weight[None] + torch.tensor([[0.], [0.], [NAN]], device=D)
        labels = torch.tensor([0, 1, -100], device=D)
        loss = F.cross_entropy(x.reshape(-1, 2), labels)
        loss.backward()
    """,
    "running statistics that took it from data": """
        x = torch.ones(4, 3, device=D); x[2, 1] = NAN
        norm = nn.BatchNorm1d(3).to(D); norm(x); norm.eval()
        loss = norm(torch.ones(4, 3, device=D)).sum()
        loss.backward()
    """,
}


@pytest.mark.parametrize("name", GIVEN)
def test_what_was_nan_in_forward_is_not_made_by_a_node_behind_it(name: str) -> None:
    weight = torch.ones(3, 2, device="cuda", requires_grad=True)
    report = checked(GIVEN[name], D="cuda", weight=weight)
    assert places(report) == (1, 4)
    assert report is not None
    assert "Backward" not in report.headline
    assert "already" not in report.headline


def test_the_slope_of_a_function_is_made_by_its_node() -> None:
    """Its neighbour: what the node reads is finite."""
    code = """
        x = torch.zeros(2, device=D, requires_grad=True)
        y = torch.where(x > 1, x.sqrt(), 0)
        y.sum().backward()
    """
    report = checked(code, D="cuda")
    assert report is not None
    assert report.headline.startswith("the backward node SqrtBackward0 made nan at [0]")


HOOKS = [
    ("h.register_hook(lambda g: g / 0 * 0)", "gradient[0, 0] = nan already where the backward"),
    (
        "net.weight.register_hook(lambda g: g * NAN)",
        "net.weight.grad[0, 0] = nan already where torch.optim.SGD.step reads it",
    ),
]


@pytest.mark.parametrize(("hook", "headline"), HOOKS)
def test_what_a_hook_makes_of_a_gradient_is_made_by_no_call(hook: str, headline: str) -> None:
    code = f"""
        h = net(torch.ones(4, 2, device="cuda"))
        {hook}
        h.sum().backward()
        opt.step()
    """
    net = nn.Linear(2, 1).to("cuda")
    report = checked(code, net=net, opt=torch.optim.SGD(net.parameters(), lr=0.1))
    assert report is not None
    assert report.headline.startswith(headline)
    marks = {line.mark for item in report.observations for line in item.sources}
    assert "NaN is made here" not in marks
    assert report.hints == ()


def test_a_gradient_of_fewer_elements_than_it_comes_from_is_described() -> None:
    code = """
        x = torch.zeros(4, device="cuda", requires_grad=True)
        y = x / x.sum()
        torch.nan_to_num(y).sum().backward()
    """
    report = checked(code)
    assert report is not None
    assert "DivBackward0 made nan" in report.headline


def test_the_condition_of_a_where_in_a_checkpoint_is_not_asked_for_again() -> None:
    code = """
        from torch.utils.checkpoint import checkpoint
        def f(t):
            return torch.where(t > 0, t.sqrt(), 0.)
        x = torch.tensor([0., 1.], device="cuda", requires_grad=True)
        checkpoint(f, x, use_reentrant=False).sum().backward()
    """
    report = checked(code)
    assert report is not None
    assert report.limits == ()


STILL_BAD = [
    (
        """
        x = torch.tensor([[1000., 0.]], device="cuda", requires_grad=True)
        p = torch.exp(x) / torch.exp(x).sum(1, keepdim=True)
        loss = -torch.log(p[:, 1]).mean()
        loss.backward()
        """,
        "torch.log made -inf at [0] from p[:, 1] = 0.0",
    ),
    (
        """
        x = torch.tensor([0., 1., 4.], device="cuda", requires_grad=True)
        a = torch.where(x > 2, x.sqrt(), x ** .5)
        a.sum().backward()
        """,
        "the backward node PowBackward0 made inf at [0]",
    ),
]


@pytest.mark.parametrize(("code", "headline"), STILL_BAD)
def test_no_edit_is_offered_that_leaves_a_bad_gradient(code: str, headline: str) -> None:
    report = checked(code)
    assert report is not None
    assert report.headline.startswith(headline)
    assert not any(item.tried for item in report.hints)


def test_an_edit_is_offered_where_it_leaves_none() -> None:
    code = """
        x = torch.tensor([[0., 0.]], device="cuda", requires_grad=True)
        p = torch.softmax(x, 1) * torch.tensor([1., 0.], device="cuda")
        loss = -torch.log(p[:, 1]).mean()
        loss.backward()
    """
    report = checked(code)
    assert report is not None
    assert any(item.tried for item in report.hints)


def test_the_way_of_an_infinity_is_not_that_of_a_nan() -> None:
    code = """
        x = torch.tensor([[-INF, -INF], [INF, 0.]], device="cuda")
        w = torch.ones(2, device="cuda", requires_grad=True)
        (x.softmax(-1) * w)[1].sum().backward()
    """
    report = checked(code)
    assert report is not None
    marks = {line.mark for item in report.observations for line in item.sources}
    assert "inf comes in here" in marks
    assert "nan comes in here" not in marks
    assert [item.text for item in report.hints] == [
        "x contains inf, and softmax of a row with inf is nan"
    ]
