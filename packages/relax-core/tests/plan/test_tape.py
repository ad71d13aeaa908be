"""Peaks of small tapes, counted by hand."""

from relax_core.plan.tape import Buffer, Op, Tape, Work, measure


def chain(saves_first: bool = True) -> Tape:
    """x (10 bytes) -> f -> 20 -> g -> 5; f keeps x, g keeps what f gave."""
    x, y, z = Buffer(10), Buffer(20), Buffer(5)
    tape = Tape(part="chain")
    tape.add(Op("f", (x,), (y,), (x,) if saves_first else (), weight_grad=7))
    tape.add(Op("g", (y,), (z,), (y,), forward_extra=100, backward_extra=3))
    return tape


def test_what_is_kept_is_what_operations_save():
    peak = measure(chain())
    assert peak.saved == 10 + 20
    assert peak.by_part == {"chain": 30}
    assert measure(chain(saves_first=False)).saved == 20


def test_the_peak_holds_what_is_kept_what_is_made_and_what_the_operation_needs():
    # Forward through g: x and y are kept, z is made, and g needs 100 for itself.
    assert measure(chain()).size == 10 + 20 + 5 + 100
    assert measure(chain()).at == "g, forward"


def test_without_gradients_only_what_is_used_again_is_there():
    peak = measure(chain(), forward_only=True)
    assert peak.saved == 0
    assert peak.size == 20 + 5 + 100, "x is the caller's"


def test_backward_frees_what_an_operation_saved_and_makes_its_inputs_gradients():
    x, y, z = Buffer(10), Buffer(20), Buffer(5)
    tape = Tape()
    tape.add(Op("f", (x,), (y,), (x,), weight_grad=700))
    tape.add(Op("g", (y,), (z,), (y,)))
    # In f: x is kept, y is free again; the gradients of y and of x, and that of f's weight.
    assert measure(tape).size == 10 + 20 + 10 + 700
    assert measure(tape).at == "f, backward"


def test_a_gradient_that_is_held_stays_until_the_first_operation():
    x, y, z = Buffer(10), Buffer(20), Buffer(5)
    tape = Tape()
    tape.add(Op("f", (x,), (y,), (x,), weight_grad=700))
    tape.add(Op("g", (y,), (z,), (y,), held_grad=300))
    assert measure(tape).size == 10 + 20 + 10 + 700 + 300


def test_a_checkpoint_keeps_its_input_and_pays_for_the_inside_when_it_is_computed_again():
    x, z = Buffer(10), Buffer(5)
    tape = Tape(part="all")
    tape.add(Op("f", (x,), (z,), (x,), inner=_inside(x)))
    peak = measure(tape)
    assert peak.saved == 10
    # Computed again up to h, whose backward pass needs 50: x, a and b are kept, the gradients of h's output
    # and input are there.
    assert peak.size == 10 + 40 + 30 + 5 + 30 + 50
    assert peak.at == "h, backward"


def _inside(x: Buffer) -> Tape:
    a, b, out = Buffer(40), Buffer(30), Buffer(5)
    inner = Tape()
    inner.add(Op("f", (x,), (a,), (x,)))
    inner.add(Op("g", (a,), (b,), (a,)))
    inner.add(Op("h", (b,), (out,), (b,), backward_extra=50))
    return inner


def test_a_sum_hands_its_gradient_on_without_copies():
    x, y, out = Buffer(100), Buffer(100), Buffer(100)
    tape = Tape()
    tape.add(Op("f", (x,), (y,)))
    tape.add(Op("sum", (x, y), (out,), passes_grad=True))
    # In f: the gradient of the sum is that of x and of y; f's own share of x's comes to it: two in all.
    assert measure(tape).size == 200


def test_views_own_no_memory_and_their_gradients_are_joined():
    x = Buffer(30)
    tape = Tape()
    fused = tape.add(Op("f", (x,), (Buffer(30),), (x,)))[0]
    one, two = tape.split(fused, [10, 20])
    tape.add(Op("g", (one, two), (Buffer(1),), (one, two)))
    peak = measure(tape)
    assert peak.saved == 60, "x, and the whole of what f gave, once"
    # Splitting back: x is kept, the views' gradients are there and the joined one is made.
    assert peak.size == 30 + (10 + 20) + 30 + 1


def test_an_output_that_is_made_again_is_not_kept_and_costs_its_forward_pass_twice():
    x, y, z = Buffer(10), Buffer(20), Buffer(5)
    tape = Tape()
    work = Work(flops=3.0)
    tape.add(Op("norm", (x,), (y,), (x,), recomputed=True, forward=work))
    tape.add(Op("g", (y,), (z,), (y,)))
    assert measure(tape).saved == 10
    assert [backward.flops for name, _, backward in tape.works() if name == "norm"] == [0.0, 3.0]


def test_a_later_operation_does_not_find_what_was_let_go():
    x, y, z, out = Buffer(10), Buffer(20), Buffer(5), Buffer(1)
    tape = Tape()
    tape.add(Op("norm", (x,), (y,), (x,), recomputed=True))
    tape.add(Op("g", (y,), (z,), (y,)))
    tape.add(Op("h", (z,), (out,), forward_extra=1000))
    assert measure(tape).size == 10 + 5 + 1 + 1000


def test_what_enters_a_checkpoint_counts_once_while_it_is_computed_again():
    x, a, z = Buffer(10), Buffer(40), Buffer(5)
    inner = Tape()
    inner.add(Op("f", (x,), (a,), (x,), forward_extra=1000))
    inner.add(Op("g", (a,), (Buffer(5),), (a,)))
    tape = Tape()
    tape.add(Op("both", (x,), (z,), (x,), inner=inner))
    # The gradient of z is there when f is computed again.
    assert measure(tape).size == 10 + 40 + 5 + 1000
    assert measure(tape).at == "f, forward"
