"""The engines of one API server, found without a search through all engines."""

from hypothesis import given
from hypothesis import strategies as st

from kv_connector.router.engines.places import Places

PLACES = st.tuples(st.sampled_from(("http://a", "http://b", "http://c")), st.integers(0, 2))


@given(st.lists(st.tuples(st.booleans(), PLACES)))
def test_engines_of_a_server_are_those_that_a_search_finds(steps: list[tuple[bool, tuple[str, int]]]) -> None:
    places: Places[int] = Places()
    for number, (adds, place) in enumerate(steps):
        if adds:
            places[place] = number
        elif place in places:
            del places[place]
    for url in ("http://a", "http://b", "http://c"):
        found = sorted(engine for (at, _), engine in places.items() if at == url)
        assert sorted(places.at(url)) == found
    assert places.keys() == {(url, rank) for url, served in places._servers.items() for rank in served}


def test_server_without_engines_is_forgotten() -> None:
    places: Places[str] = Places()
    places["http://a", 0] = "one"
    del places["http://a", 0]
    assert (places.at("http://a"), places._servers) == ([], {})
