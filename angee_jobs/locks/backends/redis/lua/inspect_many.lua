-- The live holds among some names.
--
-- KEYS  the holds
-- ARGV  their names
-- Returns the time in microseconds, the number of names, and name and hold of each.

local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]

local answer = {string.format('%.0f', now), #KEYS}
for i, key in ipairs(KEYS) do
    local hold = redis.pcall('GET', key)
    local expires = type(hold) == 'string' and tonumber(string.sub(hold, 1, 16))
    if expires and expires > now then
        answer[#answer + 1] = ARGV[i]
        answer[#answer + 1] = hold
    end
end
return answer
