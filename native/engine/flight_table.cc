#include "engine/flight_table.h"

#include <utility>

#include "lane/immediate.h"

namespace kvc {

std::optional<uint32_t> Flight::counter() const {
  if (!request || !request->counted()) return std::nullopt;
  return Immediate::with_multiplicity(*request->immediate(), 1);
}

void FlightTable::grow() {
  free_.push_back(static_cast<uint32_t>(entries_.size()));
  entries_.emplace_back().generation = first_generation_;
}

std::optional<uint32_t> FlightTable::find(WorkId work) const noexcept {
  const auto place = static_cast<uint32_t>(work);
  if (place >= entries_.size()) return std::nullopt;
  const Entry& entry = entries_[place];
  if (!entry.flight.used || entry.generation != static_cast<uint32_t>(work >> 32)) return std::nullopt;
  return place;
}

void FlightTable::leave_link(uint32_t place) {
  const Flight& flight = entries_[place].flight;
  flight.link->bytes_in_flight -= flight.charge;
  if (flight.message) --flight.link->messages_in_flight;
}

Flight FlightTable::end(uint32_t place) {
  Flight flight = std::move(entries_[place].flight);
  if (flight.source != nullptr) --flight.source->batches_in_flight;
  ++entries_[place].generation;
  free(place);
  return flight;
}

void FlightTable::put_back(WorkId work) {
  const auto place = static_cast<uint32_t>(work);
  leave_link(place);
  Flight& flight = entries_[place].flight;
  if (flight.source != nullptr) --flight.source->batches_in_flight;
  flight.request = {};
  free(place);  // the generation stays: no other code has seen the id
}

void FlightTable::free(uint32_t place) {
  entries_[place].flight.used = false;
  free_.push_back(place);
}

}  // namespace kvc
